"""The stages of a pipeline as GPUs run them, in one thread and on one device: a GPU, or the CPU with the kernels
interpreted. They hand each other their messages through memory."""

import dataclasses
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.config.stages import share_layers
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.executor.feedback import TokenFeedback
from tokenmill_engine.kv_cache.spec import group_layers
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.models.loader import WeightLoading, build_model
from tokenmill_engine.outputs import KVCapacity, StepPlan, StepResult
from tokenmill_engine.worker.cuda_graphs import Call, GraphStore
from tokenmill_engine.worker.cuda_inputs import CudaInputs
from tokenmill_engine.worker.cuda_media import media_of
from tokenmill_engine.worker.cuda_stages import CudaRelay
from tokenmill_engine.worker.cuda_steps import CudaSteps, steps_of
from tokenmill_engine.worker.encoder_shares import EncoderShare
from tokenmill_engine.worker.memory import allocate_kv_caches
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan
from tokenmill_engine.worker.runner import PendingStep, Runner
from tokenmill_engine.worker.shapes import Ladder
from tokenmill_engine.worker.slots import SlotShape, SlotTables

_MAX_LEN = 528


class Graphs:
    """The graphs of a stage and which of them were used; on a CPU the calls that they would be captured from."""

    def __init__(self, device: torch.device) -> None:
        self._store = GraphStore(device) if device.type == "cuda" else None
        self._calls: dict[Hashable, Call] = {}
        self.used: set[Hashable] = set()

    def replay(self, key: Hashable) -> torch.Tensor | None:
        if key not in self._calls:
            return None
        self.used.add(key)
        return self._calls[key]() if self._store is None else self._store.replay(key)

    @torch.inference_mode()
    def take(self, calls: Sequence[tuple[Hashable, Call]]) -> None:
        """From now on these are replayed. On a GPU they run once before they are captured."""
        self._calls = dict(calls)
        if self._store is not None:
            self._store.rehearse([call for _, call in calls])
            for key, call in calls:
                self._store.capture(key, call)


class Pipe:
    """One stage's view of a chain. What was sent lies in `queues`, one before each stage, until it is fetched."""

    def __init__(self, rank: int, queues: Sequence["deque[Message]"]) -> None:
        self.rank, self.size, self._queues = rank, len(queues), queues
        self.received_tag: int | None = None

    def send(self, x: torch.Tensor, tag: int) -> None:
        self._queues[self.rank + 1].append(Message(x, tag))

    def receive(self, out: torch.Tensor, tag: int) -> torch.Tensor:
        message = self._queues[self.rank].popleft()
        assert message.tag == tag
        self.received_tag = tag
        return message.copy_to(out)

    def agree_min(self, value: int) -> int:
        return value


class Message:
    """Copied on the current stream when it is made, and again when it is fetched."""

    def __init__(self, x: torch.Tensor, tag: int) -> None:
        self.tag, self.content = tag, x.clone()
        self._sent = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None

    def copy_to(self, out: torch.Tensor) -> torch.Tensor:
        assert out.shape == self.content.shape
        if self._sent is not None:
            self._sent.wait()
            self.content.record_stream(torch.cuda.current_stream(out.device))
        return out.copy_(self.content)


class LocalStages:
    """An executor. Each step is handed to all stages at once; `launching` surrounds that."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        *,
        with_graphs: bool,
        launching: Callable[[], AbstractContextManager[None]] = nullcontext,
        group: Group = ALONE,
    ) -> None:
        """`group`: who have each layer together, every one in a process of its own with all that is here."""
        num_layers, num_stages = config.model.architecture.num_layers, config.parallel.pipeline_parallel_size
        self._config, self._device, self._with_graphs, self._launching = config, device, with_graphs, launching
        self._group = group
        self._feedback = TokenFeedback()
        self.queues: list[deque[Message]] = [deque() for _ in range(num_stages)]
        self.graphs: list[Graphs] = []
        self.steps: list[CudaSteps | CudaRelay] = []
        self.runners: list[Runner] = []
        for stage in share_layers(num_layers, num_stages, config.parallel.pipeline_layers):
            model = build_model(config.model, device, group=group, stage=stage)
            with WeightLoading(model, config.model) as loading:
                loading.finish(allow_fused=False)
            self._add(model, num_stages)
        num_blocks, max_len = config.cache.num_gpu_blocks_override or 0, config.model.max_model_len
        groups = group_layers(model.kv_specs)
        self.capacity = KVCapacity(num_blocks, config.cache.block_size, max_len, 0, groups, "built in", {})

    def _add(self, model: DenseDecoder, num_stages: int) -> None:
        """One more stage, whose kernels have run and which knows the others."""
        config, device = self._config, self._device
        max_seqs, budget = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        block_size, groups = config.cache.block_size, group_layers(model.kv_specs)
        media, vocab_size = config.model.media, model.architecture.vocab_size
        has_deltas = media is not None and media.mrope_section is not None
        shape = SlotShape(max_seqs, _MAX_LEN, _MAX_LEN // block_size, len(groups), vocab_size, has_deltas)
        ladder = Ladder(max_seqs, budget)
        tables = SlotTables(shape, device, shared=False)
        inputs = CudaInputs(tables, block_size, ladder.num_rows, budget)
        graphs = Graphs(device)
        steps = steps_of(model, inputs, graphs, ladder if self._with_graphs else None, num_stages)
        steps.media = media_of(model, config, tables, EncoderShare.of(self._group, config.model))
        num_blocks = config.cache.num_gpu_blocks_override or 0
        steps.kv_caches = allocate_kv_caches(groups, num_blocks, block_size, model.dtype, device)
        graphs.take(steps.graph_calls())
        inputs.ring.clear()
        # As before the first request: nobody is there to exchange anything with.
        runner = steps.runner()
        runner.execute(rehearsal_plan(2, 5, len(groups), block_size, GREEDY)).wait()
        assert not any(self.queues)
        steps.connect(Pipe(len(self.steps), self.queues))
        self.steps.append(steps)
        self.runners.append(runner)
        self.graphs.append(graphs)

    def submit(self, plan: StepPlan) -> "_Submitted":
        sent = dataclasses.replace(plan, sampled=self._feedback.sent(plan))
        with self._launching():
            pending = [runner.execute(sent) for runner in self.runners]
        return _Submitted(plan, pending, self._feedback)

    def shutdown(self) -> None:
        """Nothing outlives the object."""


class _Submitted:
    def __init__(self, plan: StepPlan, pending: list[PendingStep], feedback: TokenFeedback) -> None:
        self._plan, self._pending, self._feedback = plan, pending, feedback

    def result(self) -> StepResult:
        *earlier, result = [pending.wait() for pending in self._pending]
        assert not any(other.num_new.any() for other in earlier)
        self._feedback.received(self._plan, result)
        return result
