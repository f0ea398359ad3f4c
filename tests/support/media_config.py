"""Configurations of models with eyes that are not loaded."""

from tokenmill_engine.config.media import MediaConfig, VisionConfig
from tokenmill_server.multimodal.video_options import VideoMethod


def media_config(kind: VideoMethod) -> MediaConfig:
    """Patches as large as in the models that are published."""
    vision = VisionConfig(
        kind="qwen2_vl",
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        patch_size=14 if kind == "qwen2_vl" else 16,
        output_size=64,
        activation="silu",
        temporal_patch_size=2,
        spatial_merge_size=2,
    )
    return MediaConfig("qwen2_vl", 1, vision, video_token_id=2, takes_video=True, frames_apart=kind == "qwen3_vl")
