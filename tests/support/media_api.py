"""The configuration of API servers whose model looks at images."""

from tests.support.api_server import engine_config
from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.config.model_files import resolve_model


def qwen() -> EngineConfig:
    """Of a tiny Qwen2-VL."""
    files = resolve_model(str(cached_tiny_media_model("qwen2_vl")))
    return engine_config(
        name=files.name,
        path=files.path,
        tokenizer_path=files.tokenizer_path,
        architecture=files.architecture,
        load_format="safetensors",
        eos_token_ids=files.eos_token_ids,
        media=files.media,
        max_model_len=1024,
    )
