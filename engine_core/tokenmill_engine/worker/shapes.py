"""Padded sizes of steps: which of them have CUDA graphs, and which one a step takes. Torch-free.

Decode steps are bound by memory traffic, so a few padded rows cost next to nothing; the sizes are dense where the
relative cost of padding is largest. Mixed steps of less than 32 tokens cost as much as one of 32, and those of more
than 512 are padded to what the tiles of matrix products take anyway.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenmill_engine.outputs import StepPlan

MAX_GRAPH_TOKENS = 2048
"""Steps with more tokens keep the device busy longer than it takes to enqueue them kernel by kernel: that takes 50 us
for each kernel on the CPUs of some machines with GPUs, 8 ms for a model of 1B parameters."""

_SAMPLE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_DECODE_SIZES = (*_SAMPLE_SIZES, 640, 768, 896, 1024)
_MIXED_SIZES = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


@dataclass(frozen=True, slots=True)
class StepShape:
    """What fixes every launch of a forward pass; lengths and counts are read on the device."""

    num_tokens: int
    """Rows of the hidden states, padding included."""
    num_rows: int
    """Requests, padding included."""
    num_decodes: int
    """As in `ForwardBatch`."""
    max_query_len: int
    num_outputs: int | None
    """Hidden states that are asked for, those of chosen tokens; None if it is all of them, in order."""
    any_mix: bool = False
    """As in `ForwardBatch`."""

    @property
    def num_hidden(self) -> int:
        """Rows of the result."""
        return self.num_tokens if self.num_outputs is None else self.num_outputs


def decode_shape(num_rows: int) -> StepShape:
    """`num_rows` requests with one token each, all of which sample."""
    return StepShape(num_rows, num_rows, num_rows, 1, None)


def exact_shape(plan: StepPlan, num_outputs: int | None) -> StepShape:
    """The shape of `plan` without padding, if the hidden states of `num_outputs` chosen tokens are wanted."""
    if plan.num_decodes == plan.num_reqs:
        return decode_shape(plan.num_reqs)
    return StepShape(plan.num_tokens, plan.num_reqs, plan.num_decodes, int(plan.num_scheduled.max()), num_outputs)


_CHUNK_SIZES = (2, 16, 32, 64, 128)
_MANY_DECODES = 48
"""With one more request, more than attention counts as few."""


def chunk_shapes(max_num_seqs: int, max_tokens: int) -> list[StepShape]:
    """Steps with a chunk of a prompt, of which every hidden state is asked for, as examples: between them they launch
    every variant of the kernels that small steps without a graph do. Kernels are chosen by whether a chunk is short,
    whether there are decodes beside it and whether these are few; those of matrix products by the number of tokens."""
    chunks = [(size, 0) for size in _CHUNK_SIZES]
    beside_decodes = [(size, decodes) for size in (_CHUNK_SIZES[0], _CHUNK_SIZES[-1]) for decodes in (1, _MANY_DECODES)]
    return [
        StepShape(size + decodes, 1 + decodes, decodes, size, None)
        for size, decodes in (*chunks, *beside_decodes)
        if size + decodes <= max_tokens and 1 + decodes <= max_num_seqs
    ]


@dataclass(frozen=True, slots=True)
class SampleShape:
    """What fixes every launch of the choice of tokens."""

    num_rows: int
    """Rows that sample, padding included."""
    features: int
    """Bits of `sampling.table` that rows may have."""


class Ladder:
    """The sizes with graphs, for at most `max_num_seqs` requests and `max_tokens` tokens in a step."""

    def __init__(self, max_num_seqs: int, max_tokens: int) -> None:
        self.num_rows = max(max_num_seqs, 2)
        """Rows that buffers need."""
        max_decodes = min(max_num_seqs, max_tokens)
        self.sample_sizes = _up_to(_SAMPLE_SIZES, max_decodes)
        """Numbers of rows that sample."""
        self._decode_shapes = [decode_shape(size) for size in _up_to(_DECODE_SIZES, max_decodes)]
        self._mixed_shapes = [self._mixed_shape(size) for size in _up_to(_MIXED_SIZES, max_tokens)]
        self._decode_shape_of, self._mixed_shape_of = _by_size(self._decode_shapes), _by_size(self._mixed_shapes)

    def _mixed_shape(self, num_tokens: int) -> StepShape:
        """Any mix of at most `num_tokens` tokens. At least two rows, of which one counts as a decode: so a request
        with one token is taken for a decode, wherever it stands, and any other for a chunk."""
        num_rows = max(min(num_tokens, self.num_rows), 2)
        num_outputs = min(num_rows, self.sample_sizes[-1])
        return StepShape(max(num_tokens, 2), num_rows, 1, num_tokens, num_outputs, any_mix=True)

    def shapes(self) -> list[StepShape]:
        """All of them; of the mixed ones and of the others those first that need the most memory."""
        return [*reversed(self._mixed_shapes), *reversed(self._decode_shapes)]

    def largest_shapes(self) -> list[StepShape]:
        """Those that need as much memory as all."""
        return [self._mixed_shapes[-1], self._decode_shapes[-1]]

    def padded(self, plan: StepPlan) -> StepShape | None:
        """The smallest shape with a graph that serves `plan`, or None."""
        if plan.num_decodes == plan.num_reqs:
            return self._decode_shape_of[plan.num_reqs] if plan.num_reqs < len(self._decode_shape_of) else None
        num_tokens = plan.num_tokens
        if num_tokens >= len(self._mixed_shape_of):
            return None
        shape = self._mixed_shape_of[num_tokens]
        return shape if plan.num_reqs <= shape.num_hidden or plan.samples.sum() <= shape.num_hidden else None

    def sample_size(self, num_samples: int) -> int | None:
        """The smallest number of sampling rows with a graph that holds `num_samples`, or None."""
        index = bisect_left(self.sample_sizes, num_samples)
        return self.sample_sizes[index] if index < len(self.sample_sizes) else None


def _up_to(sizes: Sequence[int], limit: int) -> list[int]:
    """Those of `sizes` that are needed up to `limit`, which takes the place of the last one if that is larger."""
    largest = min(sizes[-1], limit)
    return [*(size for size in sizes if size < largest), largest]


def _by_size(shapes: Sequence[StepShape]) -> list[StepShape]:
    """[0 .. largest size]: the shape to take, by the number of tokens."""

    def entries() -> Iterator[StepShape]:
        first = 0
        for shape in shapes:
            yield from (shape for _ in range(first, shape.num_tokens + 1))
            first = shape.num_tokens + 1

    return list(entries())
