"""A stage of a pipeline, on the CPU: what it takes from the stage before, and what it hands on to the next one.

All stages carry out the same plans in the same order. Those before the last one sample nothing: the tokens that the
last one sampled reach the first beside later plans, and no other stage looks at token ids.
"""

import numpy as np
import torch

from tokenmill_engine.distributed.chain import Chain
from tokenmill_engine.models.dense_decoder import DenseDecoder, KVCaches, Stream
from tokenmill_engine.outputs import StepPlan, StepResult
from tokenmill_engine.worker.inputs import CpuPreparer
from tokenmill_engine.worker.slots import SlotTables


class Inlet:
    """Where the streams of the stage before come in."""

    def __init__(self, model: DenseDecoder, chain: Chain) -> None:
        self._hidden_size = model.architecture.hidden_size
        self._dtype = model.dtype
        self._chain = chain

    def receive(self, plan: StepPlan) -> Stream:
        """Of all tokens of `plan`. Waits until the stage before is done with it."""
        both = torch.empty(2, plan.num_tokens, self._hidden_size, dtype=self._dtype)
        hidden, residual = self._chain.receive(both, plan.step)
        return hidden, residual


def inlet_of(model: DenseDecoder, chain: Chain) -> Inlet | None:
    """None for the stage with the first layer."""
    return None if model.stage.is_first else Inlet(model, chain)


class RelayRunner:
    """Executes step plans on a stage with another one behind it. Tables, caches and model belong to the worker."""

    def __init__(
        self, model: DenseDecoder, kv_caches: KVCaches, tables: SlotTables, block_size: int, chain: Chain
    ) -> None:
        self._model, self._kv_caches, self._tables, self._chain = model, kv_caches, tables, chain
        self._preparer = CpuPreparer(tables, block_size)
        self._inlet = inlet_of(model, chain)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> "RelayedStep":
        """Run the stage's layers and send on what comes out."""
        # First of all: a slot whose request got a token may have another request from this plan on.
        self._preparer.take_in(plan.sampled)
        self._tables.apply(plan)
        batch = self._preparer.prepare(plan).batch
        incoming = self._inlet.receive(plan) if self._inlet is not None else None
        self._chain.send(torch.stack(self._model.run_layers(batch, self._kv_caches, incoming)), plan.step)
        self._preparer.count(plan)
        return RelayedStep(plan)


class RelayedStep:
    """A step that is another stage's to finish."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def wait(self) -> StepResult:
        """A result without tokens."""
        num_reqs = self._plan.num_reqs
        return StepResult(self._plan.step, np.full((num_reqs, 1), -1, np.int32), np.zeros(num_reqs, np.int32))
