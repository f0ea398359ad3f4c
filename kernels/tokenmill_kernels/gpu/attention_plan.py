"""The work list of a step's attention, which all layers of a KV group read. Without Triton: anyone may name it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Runs of key tiles for the programs of the decode launch, and room for what has to be merged after it."""

    block_n: int
    """Keys of a tile."""
    runs: torch.Tensor
    """int32 [num_programs, 16], written on the device: see `attention_planner`."""
    partials: torch.Tensor
    """float32 [2 * num_programs, group, head_dim]: unnormalised sums of values."""
    stats: torch.Tensor
    """float32 [2 * num_programs, group, 2]: maximum score and sum of weights of each partial."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Query tiles for the prefill launch."""

    queries: int
    """Tokens of a tile."""
    tiles: torch.Tensor
    """int32 [max_tiles, 2], written on the device: request, tile within it."""
    num_tiles: torch.Tensor
    """int32 [2], written on the device: number of tiles, and how many of them programs have drawn (see `draw`)."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What `tokenmill_kernels.ops.plan_attention` leaves on the device for `paged_attention`."""

    window: int
    """Keys that a query sees; 0 means all."""
    decode: DecodePlan | None
    """None if the step has no request with one new token."""
    prefill: PrefillPlan | None
    """None if the step has no other request."""
