"""What the loader needs to know of a model."""

from typing import Protocol

import torch

from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.layers.placement import Target


class Loadable(Protocol):
    """A model that is constructed empty: every target is filled, then it is finalized."""

    architecture: ArchitectureConfig
    device: torch.device

    @property
    def is_fused(self) -> bool:
        """Whether the layers run as one native call."""

    def targets(self) -> dict[str, Target]:
        """Where each checkpoint tensor goes, or this worker's part of it, by its Hugging Face name."""

    def parameter_names(self) -> list[str]:
        """The Hugging Face names of all parameters of the whole model, in order."""

    def own_name(self, name: str) -> str | None:
        """What `targets` calls a tensor of a Hugging Face checkpoint; None for one that the model does not use."""

    def finalize(self, allow_fused: bool = True) -> None:
        """Brings the loaded weights into the form that the device's kernels like best."""
