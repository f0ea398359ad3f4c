"""Steps on a GPU. A steady one is two CUDA graphs and nothing else.

The first takes in what the host wrote, expands it into the inputs and runs the model; it depends on the number of
tokens. The second one is LM head, choice and append, and the report to the host; it depends on the number of rows that
sample. What has no graph, since it is too large or too rare, runs kernel by kernel, over the same buffers.
"""

import copy
from functools import partial

import torch

from tokenmill_engine.distributed.chain import Chain
from tokenmill_engine.models.dense_decoder import DenseDecoder, KVCaches, Stream
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.sampling import table as columns
from tokenmill_engine.sampling.masks import SampleMasks
from tokenmill_engine.sampling.sampler import Sampled
from tokenmill_engine.worker.cuda_graphs import Call, Replay
from tokenmill_engine.worker.cuda_inputs import CudaInputs
from tokenmill_engine.worker.cuda_media import CudaMedia, MediaParts
from tokenmill_engine.worker.cuda_stages import CudaInlet, CudaRelay
from tokenmill_engine.worker.inputs import StepRows
from tokenmill_engine.worker.model_runner import Hidden, ModelRunner
from tokenmill_engine.worker.shapes import Ladder, SampleShape, StepShape, exact_shape
from tokenmill_engine.worker.step_ring import StepTokens
from tokenmill_engine.worker.token_choice import TokenChooser

_FEATURE_SETS = (0, columns.RANDOM, columns.RANDOM | columns.MASK, columns.ON_DEVICE)
"""What rows of a batch may ask of the sampler for a graph to serve it; ascending in cost."""


class CudaSteps:
    """The buffers of the steps, and their graphs."""

    def __init__(
        self,
        model: DenseDecoder,
        inputs: CudaInputs,
        graphs: Replay,
        ladder: Ladder | None,
        inlet: CudaInlet | None = None,
    ) -> None:
        """Without a `ladder` there are no graphs. `inlet`: of the last stage of a pipeline."""
        self.model = model
        self.kv_caches: KVCaches = []
        """To be set before the first step; graphs are of the caches that were set when they were captured."""
        self.inputs, self.graphs, self.ladder, self.inlet = inputs, graphs, ladder, inlet
        self.media: CudaMedia | None = None
        """Of a model that looks at images."""
        self.chooser = TokenChooser(model, inputs.tables)
        self.hidden = torch.zeros(
            (inputs.num_rows, model.architecture.hidden_size), dtype=model.dtype, device=inputs.tables.device
        )

    def runner(self) -> ModelRunner:
        """What executes plans."""
        return ModelRunner(self.model, self.inputs.tables, self)

    def connect(self, chain: Chain) -> None:
        """From now on steps receive what the stage before hands on."""
        if self.inlet is not None:
            self.inlet.connect(chain)

    def excerpt(self, ladder: Ladder | None) -> "CudaSteps":
        """The same buffers, with a model of few layers that launches the same kernels, and with that `ladder`."""
        layers = self.model.distinct_layers()
        excerpt = copy.copy(self)
        excerpt.model = self.model.excerpt(layers)
        excerpt.kv_caches = [self.kv_caches[layer] for layer in layers]
        excerpt.ladder = ladder
        return excerpt

    def begin(self, plan: StepPlan) -> "_CudaStep":
        return _CudaStep(self, plan)

    def forward(
        self, shape: StepShape, num_received: int | None = None, media: MediaParts | None = None
    ) -> torch.Tensor:
        """Enqueue inputs and model, after `inputs.receive`: hidden states [num_hidden, hidden_size], in `hidden`.
        `num_received`: tokens of the message that came in, by default those of `shape`."""
        chosen = None if shape.num_outputs is None else self.inputs.logit_index[: shape.num_outputs]
        batch = self.inputs.expand(shape, media)
        out, incoming = self.hidden[: shape.num_hidden], self._incoming(shape.num_tokens, num_received)
        return self.model.forward(batch, self.kv_caches, chosen, out, incoming)

    def forward_all(
        self, shape: StepShape, num_received: int | None = None, media: MediaParts | None = None
    ) -> torch.Tensor:
        """As `forward`, of all tokens: [num_tokens, hidden_size], in new memory."""
        incoming = self._incoming(shape.num_tokens, num_received)
        return self.model.forward(self.inputs.expand(shape, media), self.kv_caches, incoming=incoming)

    def score_all(self, shape: StepShape) -> torch.Tensor:
        """As prompts are scored: logits of all tokens."""
        return self.model.compute_logits(self.forward_all(shape))

    def _incoming(self, num_tokens: int, num_received: int | None) -> Stream | None:
        return None if self.inlet is None else self.inlet.stream(num_tokens, num_received or num_tokens)

    def _receive_and_forward(self, shape: StepShape) -> torch.Tensor:
        self.inputs.receive()
        return self.forward(shape)

    def _sample(self, shape: SampleShape) -> torch.Tensor:
        """Enqueue LM head, choice and append for the first rows of `hidden`: the tokens [num_rows]."""
        slots = self.inputs.sample_slots[: shape.num_rows]
        token_ids = self.chooser.choose_on_device(self.hidden[: shape.num_rows], slots, shape.features)
        self.inputs.advance(token_ids)
        return token_ids

    def sample_shape(self, rows: StepRows, masks: SampleMasks | None) -> SampleShape | None:
        """The shape with a graph that serves these rows, or None."""
        num_samples = len(rows.sample_rows)
        num_rows = self.ladder.sample_size(num_samples) if self.ladder is not None and num_samples else None
        if num_rows is None:
            return None
        wanted = self.chooser.features(rows, masks)
        features = next((features for features in _FEATURE_SETS if wanted & ~features == 0), None)
        return None if features is None else SampleShape(num_rows, features)

    def graph_calls(self) -> list[tuple[StepShape | SampleShape, Call]]:
        """Everything that gets a graph; of each kind what needs the most memory first."""
        if self.ladder is None:
            return []
        calls: list[tuple[StepShape | SampleShape, Call]] = []
        for features in reversed(_FEATURE_SETS):
            shapes = (SampleShape(size, features) for size in reversed(self.ladder.sample_sizes))
            calls += [(shape, partial(self._sample, shape)) for shape in shapes]
        return calls + [(shape, partial(self._receive_and_forward, shape)) for shape in self.ladder.shapes()]

    def largest_graph_calls(self) -> list[tuple[StepShape | SampleShape, Call]]:
        """One or more of `graph_calls`, which need as much memory as all of them."""
        if self.ladder is None:
            return []
        samples = [SampleShape(self.ladder.sample_sizes[-1], features) for features in reversed(_FEATURE_SETS)]
        calls: list[tuple[StepShape | SampleShape, Call]] = [(shape, partial(self._sample, shape)) for shape in samples]
        return calls + [(shape, partial(self._receive_and_forward, shape)) for shape in self.ladder.largest_shapes()]


class _CudaStep:
    def __init__(self, steps: CudaSteps, plan: StepPlan) -> None:
        self._steps, self._plan = steps, plan
        self._entry = steps.inputs.ring.begin()
        changes = () if steps.media is None else steps.media.changes(plan)
        self.rows = steps.inputs.stage(plan, self._entry, changes)
        self._num_samples = len(self.rows.sample_rows)

    def forward(self, every_token: bool) -> Hidden:
        steps = self._steps
        media = steps.inputs.prepare_media(steps.media, self._plan, self.rows)
        shape = None if steps.ladder is None else steps.ladder.padded(self._plan)
        num_received = self._plan.num_tokens if shape is None else shape.num_tokens
        if steps.inlet is not None:
            steps.inlet.receive(self._plan.step, num_received)
            self._entry.mark_start()
        has_graph = shape is not None and not every_token and media is None
        hidden = steps.graphs.replay(shape) if has_graph else None
        if hidden is None:
            steps.inputs.receive()
        self._turn = steps.inputs.ring.count()
        if hidden is not None:
            return Hidden(hidden[: self._num_samples])
        if every_token:
            return self._forward_all(num_received, media)
        return Hidden(steps.forward(exact_shape(self._plan, max(self._num_samples, 1)), num_received, media))

    def _forward_all(self, num_received: int, media: MediaParts | None) -> Hidden:
        steps = self._steps
        every = steps.forward_all(exact_shape(self._plan, None), num_received, media)
        chosen = steps.hidden[: self._num_samples]
        if self._plan.num_decodes == self._plan.num_reqs:
            chosen.copy_(every)
        else:
            torch.index_select(every, 0, steps.inputs.logit_index[: self._num_samples], out=chosen)
        return Hidden(chosen, every)

    def sample(self, hidden: Hidden, masks: SampleMasks | None) -> Sampled:
        steps = self._steps
        shape = steps.sample_shape(self.rows, masks)
        if shape is not None and shape.features & columns.MASK:
            steps.chooser.load_masks(masks)
        token_ids = None if shape is None else steps.graphs.replay(shape)
        if token_ids is not None:
            return Sampled(token_ids[: self._num_samples])
        sampled = steps.chooser.choose(hidden.chosen, self.rows, masks)
        steps.inputs.advance(sampled.token_ids)
        return sampled

    def finish(self, sampled: Sampled) -> StepTokens:
        if self._steps.inlet is not None:
            self._entry.note_before(self._steps.inlet.times)
        return self._entry.finish(self._turn, len(sampled.token_ids))


def steps_of(
    model: DenseDecoder, inputs: CudaInputs, graphs: Replay, ladder: Ladder | None, num_stages: int = 1
) -> CudaSteps | CudaRelay:
    """The steps of the stage that `model` is, of so many."""
    if not model.stage.is_last:
        return CudaRelay(model, inputs, graphs, ladder, num_stages)
    return CudaSteps(model, inputs, graphs, ladder, None if model.stage.is_first else CudaInlet(model, inputs))
