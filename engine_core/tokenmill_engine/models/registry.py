"""Which class implements which architecture."""

from tokenmill_engine.config.hf_folder import SUPPORTED_ARCHITECTURES
from tokenmill_engine.config.hf_media import MEDIA_ARCHITECTURES
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.models.media_decoder import MediaDecoder

_MODELS: dict[str, type[DenseDecoder]] = {
    "LlamaForCausalLM": DenseDecoder,
    "MistralForCausalLM": DenseDecoder,
    "Qwen2ForCausalLM": DenseDecoder,
    "Qwen3ForCausalLM": DenseDecoder,
    **dict.fromkeys(MEDIA_ARCHITECTURES, MediaDecoder),
}


def model_class(architecture: str) -> type[DenseDecoder]:
    """Raises ConfigError, listing what is supported, for an architecture that nothing implements."""
    if architecture not in _MODELS:
        raise ConfigError(
            f"architecture {architecture} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return _MODELS[architecture]
