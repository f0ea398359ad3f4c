"""Which class is the encoder of which model."""

from dataclasses import replace

from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.layers.placement import Placement
from tokenmill_engine.models.vision.encoder import VisionEncoder
from tokenmill_engine.models.vision.joint import JointEncoder
from tokenmill_engine.models.vision.onevision import OneVision
from tokenmill_engine.models.vision.qwen import QwenVision
from tokenmill_engine.models.vision.qwen3 import Qwen3Vision
from tokenmill_engine.models.vision.tower import VisionTower


def make_encoder(media: MediaConfig, placement: Placement) -> VisionEncoder:
    """Empty: a loader fills `targets`, then comes `finalize`."""
    if placement.group.size == 1:
        return _make_part(media, placement)
    return JointEncoder(lambda group: _make_part(media, replace(placement, group=group)), placement)


def _make_part(media: MediaConfig, placement: Placement) -> VisionEncoder:
    vision = media.vision
    if media.views is not None:
        return OneVision(vision, media.views, placement)
    if vision.kind in ("clip", "siglip"):
        return VisionTower(vision, placement)
    return Qwen3Vision(vision, placement) if vision.kind == "qwen3_vl" else QwenVision(vision, placement)
