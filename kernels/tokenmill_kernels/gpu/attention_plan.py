"""The work list of a step's attention, which all layers of a KV group read. Without Triton: anyone may name it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What `tokenmill_kernels.ops.plan_attention` leaves on the device for `paged_attention`."""

    window: int
    """Keys that a query sees; 0 means all."""
