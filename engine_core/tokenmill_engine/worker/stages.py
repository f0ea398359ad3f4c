"""A stage of a pipeline, on the CPU: what it takes from the stage before, and what it hands on to the next one.

All stages carry out the same plans in the same order. Those before the last one sample nothing: the tokens that the
last one sampled reach the first beside later plans, and no other stage looks at token ids. With the stream goes how
long the slowest stage took: steps follow each other as quickly as that one works; and how long the first one encoded.
"""

import math
import time

import torch

from tokenmill_engine.distributed.chain import Chain
from tokenmill_engine.models.dense_decoder import DenseDecoder, KVCaches, Stream
from tokenmill_engine.outputs import StepPlan, StepResult, TokenMasks
from tokenmill_engine.worker.encoder import MediaInputs
from tokenmill_engine.worker.inputs import CpuPreparer
from tokenmill_engine.worker.results import StepTimes, without_tokens
from tokenmill_engine.worker.slots import SlotTables

_SECONDS, _TIMES_BYTES = torch.float64, 16


class Inlet:
    """Where the streams of the stage before come in."""

    def __init__(self, model: DenseDecoder, chain: Chain) -> None:
        self._hidden_size = model.architecture.hidden_size
        self._dtype = model.dtype
        self._chain = chain

    def receive(self, plan: StepPlan) -> tuple[Stream, StepTimes]:
        """The stream of all tokens of `plan`, and what the stages so far took for it. Waits until the stage before is
        done."""
        shape = (2, plan.num_tokens, self._hidden_size)
        num_bytes = math.prod(shape) * self._dtype.itemsize
        message = torch.empty(num_bytes + _TIMES_BYTES, dtype=torch.uint8)
        self._chain.receive(message, plan.step)
        hidden, residual = message[:num_bytes].view(self._dtype).view(shape)
        return (hidden, residual), StepTimes(*message[num_bytes:].clone().view(_SECONDS).tolist())


def pack(stream: Stream, times: StepTimes) -> torch.Tensor:
    """What goes from stage to stage, as `Inlet` takes it: bytes [num_bytes]."""
    tail = torch.tensor([times.elapsed_s, times.encoder_s], dtype=_SECONDS)
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in (*stream, tail)])


def inlet_of(model: DenseDecoder, chain: Chain) -> Inlet | None:
    """None for the stage with the first layer."""
    return None if model.stage.is_first else Inlet(model, chain)


class RelayRunner:
    """Executes step plans on a stage with another one behind it. Tables, caches and model belong to the worker."""

    def __init__(
        self,
        model: DenseDecoder,
        kv_caches: KVCaches,
        tables: SlotTables,
        block_size: int,
        chain: Chain,
        media: MediaInputs | None = None,
    ) -> None:
        self._model, self._kv_caches, self._tables, self._chain = model, kv_caches, tables, chain
        self._preparer = CpuPreparer(tables, block_size)
        self._inlet = inlet_of(model, chain)
        self._media = media

    def launch(self, plan: StepPlan) -> "RelayedStep":
        """As `Runner`."""
        return self.execute(plan)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> "RelayedStep":
        """Run the stage's layers and send on what comes out."""
        # First of all: a slot whose request got a token may have another request from this plan on.
        self._preparer.take_in(plan.sampled)
        self._tables.apply(plan)
        inputs = self._preparer.prepare(plan)
        incoming, before = self._inlet.receive(plan) if self._inlet is not None else (None, StepTimes())
        started = time.perf_counter()
        if self._media is not None:
            self._media.complete(plan, inputs)
        stream = self._model.run_layers(inputs.batch, self._kv_caches, incoming)
        encoder_time, elapsed_s = inputs.rows.encoder_time, max(before.elapsed_s, time.perf_counter() - started)
        encoder_s = before.encoder_s if encoder_time is None else encoder_time.seconds()
        self._chain.send(pack(stream, StepTimes(elapsed_s, encoder_s)), plan.step)
        self._preparer.count(plan)
        return RelayedStep(plan)


class RelayedStep:
    """A step that is another stage's to finish."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def choose(self, masks: TokenMasks | None) -> "RelayedStep":
        """As `LaunchedStep`: nothing is chosen here."""
        return self

    def wait(self) -> StepResult:
        """A result without tokens."""
        return without_tokens(self._plan)
