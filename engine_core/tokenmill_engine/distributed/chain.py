"""Workers that have the layers of a model one after another, as each of them sees its neighbours. Knows nothing of how
they talk."""

from typing import Final, Protocol

import torch


class Chain(Protocol):
    """One member's view, in the order of the layers."""

    @property
    def rank(self) -> int:
        """This member's number, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Members. Of 1, `send` and `receive` are never called."""

    @property
    def received_tag(self) -> int | None:
        """Of the last message that `receive` was called for and did not fail; None if there was none yet."""

    def send(self, x: torch.Tensor, tag: int) -> None:
        """To the next member; does not wait for it. `x` is contiguous and must not change any more."""

    def receive(self, out: torch.Tensor, tag: int) -> torch.Tensor:
        """Fills `out` with what the member before sent with this `tag`: of the same shape and dtype. Waits for it."""

    def agree_min(self, value: int) -> int:
        """The smallest `value` of all members. Waits on the host."""


class _OneStage:
    rank = 0
    size = 1
    received_tag: int | None = None

    def send(self, x: torch.Tensor, tag: int) -> None:
        raise RuntimeError("there is no next stage")

    def receive(self, out: torch.Tensor, tag: int) -> torch.Tensor:
        raise RuntimeError("there is no stage before")

    def agree_min(self, value: int) -> int:
        return value


ONE_STAGE: Final[Chain] = _OneStage()
"""A worker that has all layers."""
