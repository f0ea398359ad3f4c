"""Steps on a GPU. A steady one is a copy of a small array to the device, two CUDA graphs and a copy back.

The first graph expands the array into the inputs and runs the model; it depends on the number of tokens. The second
one is LM head, choice and append; it depends on the number of rows that sample. What has no graph, since it is too
large or too rare, runs kernel by kernel, over the same buffers.
"""

import copy
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.models.dense_decoder import DenseDecoder, KVCaches
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.sampling import table as columns
from tokenmill_engine.sampling.sampler import Sampled
from tokenmill_engine.worker.cuda_graphs import Call, GraphStore
from tokenmill_engine.worker.cuda_inputs import CudaInputs
from tokenmill_engine.worker.inputs import StepRows
from tokenmill_engine.worker.model_runner import Hidden
from tokenmill_engine.worker.pinned import BufferPool, StepBuffers
from tokenmill_engine.worker.shapes import Ladder, SampleShape, StepShape, decode_shape, exact_shape
from tokenmill_engine.worker.token_choice import TokenChooser

_STEPS_IN_FLIGHT = 3
"""What asynchronous scheduling needs at most; more are possible."""


_FEATURE_SETS = (0, columns.RANDOM, columns.ON_DEVICE)
"""What rows of a batch may ask of the sampler for a graph to serve it; ascending in cost."""


class CudaSteps:
    """The buffers of the steps, and their graphs."""

    def __init__(self, model: DenseDecoder, inputs: CudaInputs, graphs: GraphStore, ladder: Ladder | None) -> None:
        """Without a `ladder` there are no graphs."""
        self.model = model
        self.kv_caches: KVCaches = []
        """To be set before the first step; graphs are of the caches that were set when they were captured."""
        self.inputs, self.graphs, self.ladder = inputs, graphs, ladder
        self.chooser = TokenChooser(model, inputs.tables)
        device = inputs.tables.device
        num_rows, num_sent = inputs.num_rows, len(inputs.sent)
        self.buffers = BufferPool(_STEPS_IN_FLIGHT, lambda: StepBuffers(num_sent, num_rows))
        hidden_size = model.architecture.hidden_size
        self.hidden = torch.zeros((num_rows, hidden_size), dtype=model.dtype, device=device)
        self.token_ids = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def excerpt(self) -> "CudaSteps":
        """The same buffers, with a model of few layers that launches the same kernels."""
        layers = self.model.distinct_layers()
        excerpt = copy.copy(self)
        excerpt.model = self.model.excerpt(layers)
        excerpt.kv_caches = [self.kv_caches[layer] for layer in layers]
        return excerpt

    def begin(self, plan: StepPlan) -> "_CudaStep":
        return _CudaStep(self, plan)

    def forward(self, shape: StepShape) -> None:
        """Enqueue inputs and model; leaves the hidden states in `hidden`."""
        chosen = None if shape.num_outputs is None else self.inputs.logit_index[: shape.num_outputs]
        batch = self.inputs.expand(shape)
        self.model.forward(batch, self.kv_caches, chosen, out=self.hidden[: shape.num_hidden])

    def sample(self, shape: SampleShape) -> None:
        """Enqueue LM head, choice and append for the first rows of `hidden`; leaves the tokens in `token_ids`."""
        rows = slice(shape.num_rows)
        slots = self.inputs.sample_slots[rows]
        token_ids = self.token_ids[rows]
        token_ids.copy_(self.chooser.choose_on_device(self.hidden[rows], slots, shape.features))
        self.inputs.advance(token_ids)

    def sample_shape(self, rows: StepRows) -> SampleShape | None:
        """The shape with a graph that serves these rows, or None."""
        num_samples = len(rows.sample_rows)
        num_rows = self.ladder.sample_size(num_samples) if self.ladder is not None and num_samples else None
        if num_rows is None:
            return None
        wanted = self.chooser.features(rows)
        features = next((features for features in _FEATURE_SETS if wanted & ~features == 0), None)
        return None if features is None else SampleShape(num_rows, features)

    def graph_calls(self) -> list[tuple[StepShape | SampleShape, Call]]:
        """Everything that gets a graph; of each kind what needs the most memory first."""
        if self.ladder is None:
            return []
        calls: list[tuple[StepShape | SampleShape, Call]] = []
        for features in reversed(_FEATURE_SETS):
            shapes = (SampleShape(size, features) for size in reversed(self.ladder.decode_sizes))
            calls += [(shape, partial(self.sample, shape)) for shape in shapes]
        return calls + [(shape, partial(self.forward, shape)) for shape in self.ladder.shapes()]

    def largest_graph_calls(self) -> list[tuple[StepShape | SampleShape, Call]]:
        """One or more of `graph_calls`, which need as much memory as all of them."""
        if self.ladder is None:
            return []
        size = self.ladder.decode_sizes[-1]
        samples = [SampleShape(size, features) for features in reversed(_FEATURE_SETS)]
        calls: list[tuple[StepShape | SampleShape, Call]] = [(shape, partial(self.sample, shape)) for shape in samples]
        forwards = (self.ladder.shapes()[0], decode_shape(size))
        return calls + [(shape, partial(self.forward, shape)) for shape in forwards]


class _CudaStep:
    def __init__(self, steps: CudaSteps, plan: StepPlan) -> None:
        self._steps, self._plan = steps, plan
        self._buffers = steps.buffers.take()
        self._buffers.started.record()
        steps.inputs.tables.apply(plan)
        self.rows = steps.inputs.stage(plan, self._buffers.sent_host)
        steps.inputs.sent.copy_(self._buffers.sent, non_blocking=True)

    def forward(self, every_token: bool) -> Hidden:
        steps, num_samples = self._steps, len(self.rows.sample_rows)
        if every_token:
            return self._forward_all()
        shape = steps.ladder.padded(self._plan) if steps.ladder is not None else None
        if shape is None or not steps.graphs.replay(shape):
            steps.forward(exact_shape(self._plan, max(num_samples, 1)))
        return Hidden(steps.hidden[:num_samples])

    def _forward_all(self) -> Hidden:
        steps, num_samples = self._steps, len(self.rows.sample_rows)
        shape = exact_shape(self._plan, None)
        every = steps.model.forward(steps.inputs.expand(shape), steps.kv_caches)
        chosen = steps.hidden[:num_samples]
        if self._plan.num_decodes == self._plan.num_reqs:
            chosen.copy_(every)
        else:
            torch.index_select(every, 0, steps.inputs.logit_index[:num_samples], out=chosen)
        return Hidden(chosen, every)

    def sample(self, hidden: Hidden) -> Sampled:
        steps, num_samples = self._steps, len(self.rows.sample_rows)
        shape = steps.sample_shape(self.rows)
        token_ids = steps.token_ids[:num_samples]
        if shape is not None and steps.graphs.replay(shape):
            return Sampled(token_ids)
        sampled = steps.chooser.choose(hidden.chosen, self.rows)
        token_ids.copy_(sampled.token_ids)
        steps.inputs.advance(token_ids)
        return sampled

    def finish(self, sampled: Sampled) -> "_TokensInFlight":
        del sampled  # it is in `token_ids`
        self._buffers.token_ids.copy_(self._steps.token_ids, non_blocking=True)
        self._buffers.finished.record()
        return _TokensInFlight(self._buffers, len(self.rows.sample_rows), self._steps.buffers)


class _TokensInFlight:
    def __init__(self, buffers: StepBuffers, num_samples: int, pool: BufferPool[StepBuffers]) -> None:
        self._buffers, self._num_samples, self._pool = buffers, num_samples, pool

    def wait(self) -> tuple[NDArray[np.int32], float]:
        buffers = self._buffers
        buffers.finished.synchronize()
        token_ids = buffers.token_ids_host[: self._num_samples].copy()
        elapsed_s = buffers.started.elapsed_time(buffers.finished) * 1e-3
        self._pool.give_back(buffers)
        return token_ids, elapsed_s
