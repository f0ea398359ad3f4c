"""What is checked of the flags of images before anything loads."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmill_engine.config.model_files import ModelFiles
from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.media_limits import limits_of
from tokenmill_server.multimodal.image_options import read_image_options
from tokenmill_server.multimodal.placement import CachePlacement, place_caches
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.video_options import read_video_options

logger = logging.getLogger(__name__)


def resolve_media(fields: dict[str, Any], files: ModelFiles, stated_path: str) -> MediaSettings:
    """Settings from the values of the flags. `stated_path` is --allowed-local-media-path as the user wrote it.

    Raises ConfigError if the folder is none, or if the model's images or videos cannot be prepared.
    """
    settings = MediaSettings(**fields)
    if settings.local_path is not None:
        folder = Path(settings.local_path).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"{stated_path} is not a folder; name one that is there")
        settings = replace(settings, local_path=str(folder))
    media, folder = files.media, Path(files.path)
    if media is None:
        return settings
    settings = replace(settings, limits=limits_of(media, settings.limits))
    if settings.limits.images > 0:
        read_image_options(folder, media)
    if settings.limits.videos > 0:
        read_video_options(folder, media)
    if media.vision.image_size is not None and not settings.processor_kwargs.is_empty:
        raise ConfigError("--mm-processor-kwargs: the images of this model have one size, and there is nothing to set")
    return settings


def resolve_placement(
    settings: MediaSettings, files: ModelFiles, num_api_servers: int, num_engines: int
) -> CachePlacement | None:
    """Where prepared media are remembered, which the log is told; None: there are no media."""
    if files.media is None:
        return None
    placement = place_caches(settings, num_api_servers, num_engines)
    logger.info("%s", placement.describe())
    return placement
