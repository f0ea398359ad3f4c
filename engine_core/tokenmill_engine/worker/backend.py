"""What a kind of device has to offer a worker."""

from collections.abc import Sequence
from typing import Protocol

import torch

from tokenmill_engine.attention.backend import AttentionBackend
from tokenmill_engine.distributed.chain import Chain
from tokenmill_engine.distributed.group import Group
from tokenmill_engine.kv_cache.spec import KVGroup
from tokenmill_engine.models.dense_decoder import DenseDecoder, KVCaches
from tokenmill_engine.worker.runner import Runner
from tokenmill_engine.worker.slots import SlotShape, SlotTables


class Backend(Protocol):
    """Called in the order of the methods. Constructing one claims the device; raises StartupError if it cannot."""

    device: torch.device
    attention: AttentionBackend
    """What the layers of the model attend with."""
    group: Group
    """What they add up with: the workers that have a part of each of them."""
    chain: Chain
    """What steps go through: the workers that have the stages of the model."""
    loads_beside: bool
    """Whether weights may still arrive while `kv_bytes` measures."""

    def make_tables(self, shape: SlotShape) -> SlotTables:
        """Slots on the device."""

    def attach(self, model: DenseDecoder, tables: SlotTables, groups: Sequence[KVGroup]) -> None:
        """The model and the slots, both on the device."""

    def kv_bytes(self, block_bytes: int) -> int:
        """Memory for the KV cache. Raises StartupError if there is none, or less than is asked for."""

    def start(self, kv_caches: KVCaches) -> Runner:
        """A runner that has seen its kernels run once."""

    @property
    def prefill_costs(self) -> tuple[tuple[int, float], ...]:
        """As in `KVCapacity`; known once the runner is there."""
