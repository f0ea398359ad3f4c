"""What a model is used for, text or vectors, and what follows from that."""

import logging
from dataclasses import replace
from pathlib import Path

from tokenmill_engine.config.engine import CacheConfig, ModelConfig, SchedulerConfig
from tokenmill_engine.config.model_files import ModelFiles
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.config.pooling import PoolingConfig, SentenceModel, read_sentence_model
from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.pooling import POOLING_TASKS
from tokenmill_server.flags.values import FlagValues

logger = logging.getLogger(__name__)


def resolve_pooling(values: FlagValues, files: ModelFiles) -> SentenceModel | None:
    """How texts become vectors; None if the model is to generate text, for which files about vectors mean nothing.

    Raises ConfigError if the model cannot do what is asked for, or flags contradict each other.
    """
    asked: dict[str, bool] = {}
    """By flag: whether it asks for vectors."""
    if values["runner"] != "auto":
        asked["runner"] = values["runner"] == "pooling"
    if values["task"] != "auto":
        asked["task"] = values["task"] in POOLING_TASKS
    if values["convert"] == "embed":
        asked["convert"] = True
    if len(set(asked.values())) > 1:
        first, second = list(asked)[:2]
        raise ConfigError(f"{values.stated(first)} contradicts {values.stated(second)}; leave one out")
    flag = next(iter(asked), "runner")
    made_for = _made_for(files) if asked.get(flag, True) else None
    if not asked.get(flag, made_for is not None):
        if not files.architecture.has_output_embeddings:
            raise ConfigError(
                f"{values.stated(flag)} does not fit {files.name}: {files.architecture.name} without output embeddings "
                "generates no text; use --runner pooling or auto"
            )
        return None
    if files.media is not None:
        raise ConfigError(f"{values.stated(flag)}: models that take images give no vectors here; use a model of text")
    if made_for is None:
        if values["convert"] == "none":
            raise ConfigError(
                f"{values.stated('convert')} does not fit {files.name}, which was made to generate text; leave it out"
            )
        return SentenceModel(PoolingConfig("last"))
    if made_for.pooling.kind != "last" and files.architecture.text_encoder is None:
        raise ConfigError(
            f"{files.name} makes vectors by {made_for.pooling.kind!r} pooling; of {files.architecture.name} only that "
            "of the last token is supported"
        )
    return made_for


def _made_for(files: ModelFiles) -> SentenceModel | None:
    """How its authors make vectors with a model; None for one that was made to generate text."""
    encoder = files.architecture.text_encoder
    found = None
    if files.kind == "hf" and (encoder is None or not encoder.scores_pairs):  # else these files are not about it
        found = read_sentence_model(Path(files.path))
    return SentenceModel(files.pooling) if found is None and files.pooling is not None else found


def check_text_encoder(values: FlagValues, files: ModelFiles, workers: ParallelConfig) -> None:
    """Raises ConfigError for what a text encoder cannot do."""
    if files.architecture.text_encoder is None:
        return
    if workers.world_size > 1:
        flag = "tensor_parallel_size" if workers.tensor_parallel_size > 1 else "pipeline_parallel_size"
        raise ConfigError(
            f"{values.stated(flag)} does not fit {files.architecture.name}, which one worker has as a whole; "
            "use --data-parallel-size for more of them"
        )
    for key in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
        if values.is_given(key):
            logger.warning("%s has no effect: %s has no KV cache", values.written(key), files.architecture.name)


def fit_whole_prompts(
    values: FlagValues, model: ModelConfig, scheduler: SchedulerConfig, cache: CacheConfig
) -> tuple[ModelConfig, SchedulerConfig, CacheConfig]:
    """For a text encoder: every prompt fits into one step, and nothing is cached. For others as they are.

    Raises ConfigError if both lengths were given and do not fit.
    """
    if model.architecture.text_encoder is None:
        return model, scheduler, cache
    scheduler, cache = replace(scheduler, whole_prompts=True), replace(cache, enable_prefix_caching=False)
    if model.max_model_len <= scheduler.max_num_batched_tokens:
        return model, scheduler, cache
    if not values.is_given("max_num_batched_tokens"):
        return model, replace(scheduler, max_num_batched_tokens=model.max_model_len), cache
    if model.max_model_len_explicit:
        raise ConfigError(
            f"{values.stated('max_num_batched_tokens')} is less than {values.stated('max_model_len')}, but "
            f"{model.architecture.name} computes a text in one step; use --max-num-batched-tokens {model.max_model_len}"
        )
    return replace(model, max_model_len=scheduler.max_num_batched_tokens), scheduler, cache
