"""What becomes of a model's vision encoder: from the flags, before anything loads."""

import logging
from dataclasses import replace

from tokenmill_engine.config.model_files import ModelFiles
from tokenmill_engine.config.parallel import check_encoder_parallel, check_first_stage
from tokenmill_engine.config.stages import share_layers
from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.media_limits import limits_of
from tokenmill_server.flags.values import FlagValues
from tokenmill_server.multimodal.processor_kwargs import NOTHING_SAID
from tokenmill_server.multimodal.settings import MOST_ITEMS, PromptLimits
from tokenmill_server.multimodal.video_reading import VideoReading

logger = logging.getLogger(__name__)


def with_wanted_media(files: ModelFiles, values: FlagValues) -> ModelFiles:
    """`files`, as of a model of text alone if nothing else is to be served: then no encoder is loaded. That is decided
    here alone: a configuration has `media` if and only if requests may have some.

    Raises ConfigError for flags that contradict each other.
    """
    limits: PromptLimits = values["limit_mm_per_prompt"] or PromptLimits()
    if values["language_model_only"] and values.is_given("limit_mm_per_prompt") and limits != PromptLimits(0, 0):
        values.settle("language_model_only", "limit_mm_per_prompt", "a model of text alone takes no images or videos")
    media = files.media
    if media is None:
        _check_text_alone(files, values)
        return files
    takes_nothing = values["language_model_only"] or limits_of(media, limits) == PromptLimits(0, 0)
    return replace(files, media=None) if takes_nothing else files


def _check_text_alone(files: ModelFiles, values: FlagValues) -> None:
    """Raises ConfigError for a flag that says something of media which the model does not take. The environment may be
    that of several servers."""
    limits: PromptLimits | None = values["limit_mm_per_prompt"]
    asks = {
        "limit_mm_per_prompt": limits is not None and not {limits.images, limits.videos} <= {0, MOST_ITEMS},
        "media_io_kwargs": values["media_io_kwargs"] not in (None, VideoReading()),
        "mm_processor_kwargs": values["mm_processor_kwargs"] not in (None, NOTHING_SAID),
    }
    for key in asks:
        if asks[key] and key not in values.from_environment:
            raise ConfigError(
                f"{values.written(key)}: the model {files.name} takes text only; leave it out, or serve a model that "
                "looks at images"
            )


def check_encoder(files: ModelFiles, values: FlagValues) -> None:
    """Raises ConfigError if the workers cannot share the encoder, or what follows it, as they are to."""
    if files.media is None:
        if values["mm_encoder_tp_mode"] != "weights":
            logger.debug("%s: there is no encoder to share", values.stated("mm_encoder_tp_mode"))
        return
    size, by_size = values["tensor_parallel_size"], values.stated("tensor_parallel_size")
    check_encoder_parallel(files.media.vision, values["mm_encoder_tp_mode"], size, by_size)
    num_layers, num_stages = files.architecture.num_layers, values["pipeline_parallel_size"]
    layers = values["pipeline_parallel_layers"]
    stated = values.stated("pipeline_parallel_size")
    if layers is not None:
        stated = f"{values.written('pipeline_parallel_layers')} {','.join(map(str, layers))}"
    first = share_layers(num_layers, num_stages, layers)[0]
    check_first_stage(files.media.vision, len(first.layers), stated)
