"""A stage of a pipeline, on a GPU: what it takes from the stage before, and what it hands on to the next one.

All stages carry out the same plans in the same order, and no host waits for another stage: the device does, for a
message to come in and for the room of one that went out. A message is the stream of a step, for as many tokens as its
graph has, how long the slowest stage took and how long the first one encoded. The tokens that the last stage sampled
reach the first one beside later plans, and no other stage looks at token ids.
"""

import copy
from functools import partial

import torch

from tokenmill_engine.distributed.chain import Chain
from tokenmill_engine.models.dense_decoder import DenseDecoder, KVCaches, Stream
from tokenmill_engine.outputs import StepPlan, StepResult, TokenMasks
from tokenmill_engine.worker.cuda_graphs import Call, Replay
from tokenmill_engine.worker.cuda_inputs import CudaInputs
from tokenmill_engine.worker.cuda_media import CudaMedia, MediaParts
from tokenmill_engine.worker.inputs import StepRows
from tokenmill_engine.worker.results import without_tokens
from tokenmill_engine.worker.shapes import Ladder, StepShape, exact_shape
from tokenmill_engine.worker.step_ring import StepEntry, StepTokens
from tokenmill_kernels.gpu.stage_clock import StageClock

_GRAIN = 256
"""Bytes: where parts of a message begin, as aligned as tensors of their own."""


class MessageLayout:
    """Where things are in a message, uint8 [num_bytes]. The times come first, then the two parts of the stream."""

    def __init__(self, model: DenseDecoder) -> None:
        self._hidden_size, self._dtype = model.architecture.hidden_size, model.dtype

    def num_bytes(self, num_tokens: int) -> int:
        """Of a message of so many tokens."""
        return _GRAIN + 2 * self._part_bytes(num_tokens)

    def times(self, message: torch.Tensor) -> torch.Tensor:
        """int64 [2]: ns that the slowest stage so far took, and that the first one encoded media in."""
        return message[:16].view(torch.int64)

    def stream(self, message: torch.Tensor, num_tokens: int) -> Stream:
        """The stream of a message of so many tokens."""
        first, size = _GRAIN + self._part_bytes(num_tokens), num_tokens * self._hidden_size * self._dtype.itemsize
        hidden, residual = (
            message[start : start + size].view(self._dtype).view(num_tokens, self._hidden_size)
            for start in (_GRAIN, first)
        )
        return hidden, residual

    def _part_bytes(self, num_tokens: int) -> int:
        return -(-num_tokens * self._hidden_size * self._dtype.itemsize // _GRAIN) * _GRAIN


class CudaInlet:
    """Where the messages of the stage before come in: always in the same place, which graphs read. The step that had
    the place before is done with it, since both are on one stream."""

    def __init__(self, model: DenseDecoder, inputs: CudaInputs) -> None:
        self._layout = MessageLayout(model)
        size = self._layout.num_bytes(inputs.max_tokens)
        self._message = torch.zeros(size, dtype=torch.uint8, device=inputs.tables.device)
        self.times = self._layout.times(self._message)
        """As in a message; of the one received last."""
        self._chain: Chain | None = None

    def connect(self, chain: Chain) -> None:
        """From now on steps receive what the stage before hands on. Until then they are rehearsed on zeros."""
        self._chain = chain

    def receive(self, step: int, num_tokens: int) -> None:
        """Enqueue: take in the message of `step`, which has so many tokens."""
        if self._chain is not None:
            self._chain.receive(self._message[: self._layout.num_bytes(num_tokens)], step)

    def stream(self, num_tokens: int, num_received: int) -> Stream:
        """The first tokens of a message of `num_received`."""
        hidden, residual = self._layout.stream(self._message, num_received)
        return hidden[:num_tokens], residual[:num_tokens]


class Outlet:
    """Hands messages to the next stage, on a stream of its own: this stage goes on with the next step meanwhile, and is
    ahead of the next stage by as many steps as there are buffers."""

    def __init__(self, max_bytes: int, num_buffers: int, device: torch.device) -> None:
        self._buffers = [torch.zeros(max_bytes, dtype=torch.uint8, device=device) for _ in range(num_buffers)]
        self._aside = _Aside(device, num_buffers) if device.type == "cuda" else None
        self._next = 0
        self._chain: Chain | None = None

    def connect(self, chain: Chain) -> None:
        """From now on messages are sent."""
        self._chain = chain

    def send(self, message: torch.Tensor, step: int) -> None:
        """Enqueue: hand on the message of `step`, which may change afterwards."""
        buffer = self._buffers[self._next][: len(message)]
        if self._aside is not None:
            self._aside.await_room(self._next)
        buffer.copy_(message)
        if self._chain is not None:
            if self._aside is None:
                self._chain.send(buffer, step)
            else:
                self._aside.send(self._chain, buffer, step, self._next)
        self._next = (self._next + 1) % len(self._buffers)


class _Aside:
    """The stream that sends, and which buffers it is done with."""

    def __init__(self, device: torch.device, num_buffers: int) -> None:
        # What the next stage waits for goes before what this one computes meanwhile.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._sent = [torch.cuda.Event() for _ in range(num_buffers)]  # type: ignore[no-untyped-call]

    def await_room(self, buffer: int) -> None:
        """Enqueue on the current stream: wait until what `buffer` held is sent."""
        self._sent[buffer].wait()

    def send(self, chain: Chain, message: torch.Tensor, step: int, buffer: int) -> None:
        """Enqueue: send `message`, which the current stream has written into `buffer`."""
        self._stream.wait_stream(torch.cuda.current_stream(message.device))
        with torch.cuda.stream(self._stream):
            chain.send(message, step)
            self._sent[buffer].record()


class CudaRelay:
    """Steps of a stage with another one behind it. A steady one is a CUDA graph, which takes in what the host wrote,
    runs the layers and counts the tokens as computed; before it a message comes in, and after it one goes out."""

    def __init__(
        self, model: DenseDecoder, inputs: CudaInputs, graphs: Replay, ladder: Ladder | None, num_stages: int
    ) -> None:
        """Without a `ladder` there are no graphs."""
        self.model = model
        self.kv_caches: KVCaches = []
        """As in `CudaSteps`."""
        self.inputs, self.graphs, self.ladder = inputs, graphs, ladder
        self.media: CudaMedia | None = None
        """As in `CudaSteps`."""
        device = inputs.tables.device
        self._inlet = None if model.stage.is_first else CudaInlet(model, inputs)
        self._layout = MessageLayout(model)
        max_bytes = self._layout.num_bytes(inputs.max_tokens)
        self._message = torch.zeros(max_bytes, dtype=torch.uint8, device=device)
        """Of the step under way: graphs write it."""
        self._clock = StageClock(self._layout.times(self._message))
        self._encoded = False
        """Whether the step before encoded media."""
        # All steps that are under way at once may be here, but for the one that the next stage has.
        self._outlet = Outlet(max_bytes, num_stages, device)
        self._no_tokens = torch.zeros(0, dtype=torch.int32, device=device)

    def runner(self) -> "CudaRelay":
        """What executes plans."""
        return self

    def excerpt(self, ladder: Ladder | None) -> "CudaRelay":
        """As in `CudaSteps`."""
        layers = self.model.distinct_layers()
        excerpt = copy.copy(self)
        excerpt.model = self.model.excerpt(layers)
        excerpt.kv_caches = [self.kv_caches[layer] for layer in layers]
        excerpt.ladder = ladder
        return excerpt

    def connect(self, chain: Chain) -> None:
        """From now on steps exchange messages with the other stages."""
        if self._inlet is not None:
            self._inlet.connect(chain)
        self._outlet.connect(chain)

    def launch(self, plan: StepPlan) -> "CudaRelayedStep":
        """As `Runner`."""
        return self.execute(plan)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> "CudaRelayedStep":
        """Enqueue one step."""
        entry = self.inputs.ring.begin()
        rows = self._stage(plan, entry)
        media = self._prepare_media(plan, rows)
        shape = None if self.ladder is None else self.ladder.padded(plan)
        num_tokens = plan.num_tokens if shape is None else shape.num_tokens
        if self._inlet is not None:
            self._inlet.receive(plan.step, num_tokens)
            entry.mark_start()
        message = None if shape is None or media is not None else self.graphs.replay(shape)
        if message is None:
            self.inputs.receive()
        turn = self.inputs.ring.count()
        if message is None:
            message = self.forward(exact_shape(plan, None), num_tokens, media)
        tokens = entry.finish(turn, 0)
        # Behind the end of the step, which takes no longer because the next stage is busy.
        self._outlet.send(message, plan.step)
        return CudaRelayedStep(plan, tokens)

    def forward(self, shape: StepShape, num_sent: int | None = None, media: MediaParts | None = None) -> torch.Tensor:
        """Enqueue inputs and layers, after `inputs.receive`, and the end of the step: the message for the next stage.
        `num_sent`: tokens of messages, by default those of `shape`."""
        num_sent = num_sent or shape.num_tokens
        self._clock.start()
        batch = self.inputs.expand(shape, media)
        incoming = None if self._inlet is None else self._inlet.stream(shape.num_tokens, num_sent)
        outgoing = self.model.run_layers(batch, self.kv_caches, incoming)
        self.inputs.advance(self._no_tokens)
        self._clock.stop(None if self._inlet is None else self._inlet.times)
        for part, source in zip(self._layout.stream(self._message, num_sent), outgoing, strict=True):
            part[: shape.num_tokens].copy_(source)
        return self._message[: self._layout.num_bytes(num_sent)]

    def _prepare_media(self, plan: StepPlan, rows: StepRows) -> MediaParts | None:
        """As `CudaInputs.prepare_media`; the message tells how long it took."""
        encodes = self._inlet is None and plan.media is not None and bool(plan.media.encode)
        if encodes:
            self._clock.start_encoding()
        media = self.inputs.prepare_media(self.media, plan, rows)
        if encodes:
            self._clock.stop_encoding()
        elif self._encoded:
            self._clock.encode_nothing()
        self._encoded = encodes
        return media

    def _stage(self, plan: StepPlan, entry: StepEntry) -> StepRows:
        sampled = self.inputs.tables.sampled_changes(plan) if self._inlet is None else []
        changes = [] if self.media is None else self.media.changes(plan)
        try:
            return self.inputs.stage(plan, entry, [*sampled, *changes])
        except Exception:
            # They belong to requests of other steps, which do not fail.
            self.inputs.write_apart(sampled)
            raise

    def score_all(self, shape: StepShape) -> torch.Tensor:
        """As steps of `shape` run without a graph; the prompts are scored in the last stage."""
        return self.forward(shape)

    def _receive_and_forward(self, shape: StepShape) -> torch.Tensor:
        self.inputs.receive()
        return self.forward(shape)

    def graph_calls(self) -> list[tuple[StepShape, Call]]:
        """Everything that gets a graph; what needs the most memory first."""
        return [] if self.ladder is None else self._calls(self.ladder.shapes())

    def largest_graph_calls(self) -> list[tuple[StepShape, Call]]:
        """As in `CudaSteps`."""
        return [] if self.ladder is None else self._calls(self.ladder.largest_shapes())

    def _calls(self, shapes: list[StepShape]) -> list[tuple[StepShape, Call]]:
        return [(shape, partial(self._receive_and_forward, shape)) for shape in shapes]


class CudaRelayedStep:
    """A step that is another stage's to finish."""

    def __init__(self, plan: StepPlan, tokens: StepTokens) -> None:
        self._plan, self._tokens = plan, tokens

    def choose(self, masks: TokenMasks | None) -> "CudaRelayedStep":
        """As `LaunchedStep`: nothing is chosen here."""
        return self

    def wait(self) -> StepResult:
        """A result without tokens, when this stage is done."""
        _, times = self._tokens.wait()
        return without_tokens(self._plan, times.elapsed_s)
