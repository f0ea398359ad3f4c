"""The whole stack in one call, against the same stack of reference operators."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tests.support.kernel_inputs import cos_sin_table, relative_error
from tokenmill_kernels import ops, reference
from tokenmill_kernels.cpu.decoder import AddedRows, DecoderLayerWeights, DecoderShape, DenseDecoder
from tokenmill_kernels.cpu.packed import pack

VOCAB_SIZE = 97
BLOCK_SIZE = 16
NUM_BLOCKS = 64
MAX_POSITION = 512
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative error of the hidden states; the fused residual stream is float32 where the operators' is bfloat16."""

SHAPE = DecoderShape(
    num_layers=3,
    hidden_size=72,
    intermediate_size=100,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    scale=0.25,
)


def random_layer(shape: DecoderShape, *, biases: bool, norms: bool, window: int | None) -> DecoderLayerWeights:
    hidden, inner = shape.hidden_size, shape.intermediate_size

    def matrix(out_features: int, in_features: int) -> torch.Tensor:
        return torch.randn(out_features, in_features) * in_features**-0.5

    def bias(size: int) -> torch.Tensor | None:
        return torch.randn(size) * 0.1 if biases else None

    return DecoderLayerWeights(
        input_norm=1 + 0.1 * torch.randn(hidden),
        qkv=matrix(shape.qkv_size, hidden),
        output=matrix(hidden, shape.attended_size),
        post_attention_norm=1 + 0.1 * torch.randn(hidden),
        gate=matrix(inner, hidden),
        up=matrix(inner, hidden),
        down=matrix(hidden, inner),
        qkv_bias=bias(shape.qkv_size),
        output_bias=bias(hidden),
        gate_bias=bias(inner),
        up_bias=bias(inner),
        down_bias=bias(hidden),
        q_norm=1 + 0.1 * torch.randn(shape.head_dim) if norms else None,
        k_norm=1 + 0.1 * torch.randn(shape.head_dim) if norms else None,
        window=window,
    )


@dataclass(slots=True)
class Step:
    """One step's tensors. Request r has the blocks 4r .. 4r + 3."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


def make_step(requests: Sequence[tuple[int, int]], *, padded_tokens: int = 0, padded_requests: int = 0) -> Step:
    """Requests as (new tokens, total tokens)."""
    positions = torch.cat([torch.arange(total - new, total) for new, total in requests])
    rows = torch.cat([torch.full((new,), row) for row, (new, _) in enumerate(requests)])
    tables = torch.arange(4 * (len(requests) + padded_requests), dtype=torch.int32).view(-1, 4)
    slots = tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    padding = torch.zeros(padded_tokens, dtype=torch.int32)
    starts = torch.tensor([0, *[new for new, _ in requests], *[0] * padded_requests]).cumsum(0)
    return Step(
        input_ids=torch.cat((torch.randint(0, VOCAB_SIZE, (len(positions),), dtype=torch.int32), padding)),
        positions=torch.cat((positions.int(), padding)),
        slot_mapping=torch.cat((slots, padding.long() - 1)),
        query_start_loc=starts.int(),
        seq_lens=torch.tensor([*[total for _, total in requests], *[0] * padded_requests], dtype=torch.int32),
        block_tables=tables,
    )


class Stacks:
    """The same random decoder twice, each with caches of its own."""

    def __init__(self, shape: DecoderShape, dtype: torch.dtype, layers: list[DecoderLayerWeights]) -> None:
        self.shape, self.dtype, self.layers = shape, dtype, layers
        self.embedding = torch.randn(VOCAB_SIZE, shape.hidden_size).to(dtype)
        self.final_norm = torch.randn(shape.hidden_size).to(dtype)
        self.cos_sin = cos_sin_table(MAX_POSITION, shape.head_dim)
        self.fused = DenseDecoder(shape, iter(layers), pack(self.embedding), self.final_norm, self.cos_sin)
        self.caches, self.fused_caches = self._allocate(), self._allocate()
        self.fused.bind_kv_caches(self.fused_caches)

    def _allocate(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = self.shape
        return [
            ops.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, self.dtype, "cpu")
            for _ in self.layers
        ]

    def run_fused(
        self,
        step: Step,
        output_rows: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
        cos_sin: torch.Tensor | None = None,
        added: AddedRows | None = None,
    ) -> torch.Tensor:
        return self.fused.forward(
            step.input_ids,
            step.positions,
            step.slot_mapping,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_tables=step.block_tables,
            output_rows=output_rows,
            embeddings=embeddings,
            cos_sin=cos_sin,
            added=added,
        )

    def run_reference(self, step: Step, added: AddedRows | None = None) -> torch.Tensor:
        eps = self.shape.rms_norm_eps
        residual = reference.embedding(step.input_ids, self.embedding)
        behind = [] if added is None else added.rows.split(self.shape.hidden_size, dim=1)
        for index, (layer, caches) in enumerate(zip(self.layers, self.caches, strict=True)):
            normed = reference.rms_norm(residual, self._cast(layer.input_norm), eps)
            residual = residual + self._attention(normed, layer, caches, step)
            normed = reference.rms_norm(residual, self._cast(layer.post_attention_norm), eps)
            gate = reference.linear(normed, self._cast(layer.gate), layer.gate_bias)
            up = reference.linear(normed, self._cast(layer.up), layer.up_bias)
            gated = reference.silu_mul(torch.cat((gate, up), dim=1))
            residual = residual + reference.linear(gated, self._cast(layer.down), layer.down_bias)
            if added is not None and index < len(behind):
                residual[added.tokens] += behind[index]
        return reference.rms_norm(residual, self.final_norm, eps)

    def _attention(
        self,
        normed: torch.Tensor,
        layer: DecoderLayerWeights,
        caches: tuple[torch.Tensor, torch.Tensor],
        step: Step,
    ) -> torch.Tensor:
        shape = self.shape
        heads = reference.linear(normed, self._cast(layer.qkv), layer.qkv_bias).view(len(normed), -1, shape.head_dim)
        q, k, v = torch.split(heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        norms = [None if norm is None else self._cast(norm) for norm in (layer.q_norm, layer.k_norm)]
        reference.rotary_kv_write(
            q, k, v, self.cos_sin, step.positions, step.slot_mapping, *caches, *norms, shape.rms_norm_eps
        )
        attended = reference.paged_attention(
            q,
            *caches,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_tables=step.block_tables,
            num_decodes=0,
            max_query_len=0,
            max_seq_len=0,
            scale=shape.scale,
            window=layer.window,
            soft_cap=shape.soft_cap,
        )
        return reference.linear(attended.flatten(1), self._cast(layer.output), layer.output_bias)

    def _cast(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.dtype)


def make_stacks(
    dtype: torch.dtype = torch.float32,
    shape: DecoderShape = SHAPE,
    *,
    biases: bool = False,
    norms: bool = False,
    windows: Sequence[int | None] = (None, None, None),
) -> Stacks:
    layers = [random_layer(shape, biases=biases, norms=norms, window=window) for window in windows]
    return Stacks(shape, dtype, layers)


MIXED = [(1, 60), (1, 1), (1, 33), (17, 17), (5, 40), (49, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"biases": True}, {"norms": True}, {"windows": (7, None, 20)}],
    ids=["llama", "qwen2", "qwen3", "mistral"],
)
def test_families(dtype: torch.dtype, options: dict[str, bool]) -> None:
    """A prefill of every request, then a mixed step on top of it."""
    stacks = make_stacks(dtype, **options)
    for requests in ([(max(total - new, 1), max(total - new, 1)) for new, total in MIXED], MIXED):
        step = make_step(requests)
        expected = stacks.run_reference(step)
        assert relative_error(stacks.run_fused(step), expected) < TOLERANCE[dtype]
    for ours, theirs in zip(stacks.fused_caches, stacks.caches, strict=True):
        for actual, wanted in zip(ours, theirs, strict=True):
            assert relative_error(actual, wanted) < TOLERANCE[dtype]


def test_soft_cap_and_wide_heads() -> None:
    shape = DecoderShape(
        num_layers=1,
        hidden_size=64,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=1,
        head_dim=64,
        rms_norm_eps=1e-6,
        scale=0.5,
        soft_cap=2.0,
    )
    stacks = make_stacks(shape=shape, windows=(None,))
    step = make_step([(1, 1), (40, 40)])
    assert relative_error(stacks.run_fused(step), stacks.run_reference(step)) < 1e-5


def test_padded_tokens_and_requests_change_nothing() -> None:
    stacks = make_stacks(windows=(None, 9, None))
    plain = stacks.run_fused(make_step([(1, 1), (20, 20)]))
    before = [cache.clone() for pair in stacks.fused_caches for cache in pair]
    torch.manual_seed(1)
    step = make_step([(1, 1), (20, 20)])
    torch.manual_seed(1)
    padded = make_step([(1, 1), (20, 20)], padded_tokens=11, padded_requests=2)
    alone = stacks.run_fused(step)
    assert not torch.equal(alone, plain)
    assert torch.equal(stacks.run_fused(padded)[:21], alone)
    untouched = [cache[8:] for cache in before]
    after = [cache[8:] for pair in stacks.fused_caches for cache in pair]
    assert all(torch.equal(a, b) for a, b in zip(untouched, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[0], [72], [0, 1, 2, 3, 18, 19, 24, 73], [5, 6, 7]])
def test_wanted_rows_are_those_of_the_whole(dtype: torch.dtype, rows: list[int]) -> None:
    stacks = make_stacks(dtype)
    step = make_step(MIXED)
    whole = stacks.run_fused(step)
    selected = stacks.run_fused(step, torch.tensor(rows, dtype=torch.int32))
    assert torch.equal(selected, whole[rows])


def test_no_wanted_rows() -> None:
    """A step of chunks none of which ends its prompt still fills the cache."""
    stacks = make_stacks()
    step = make_step([(30, 30)])
    none = stacks.run_fused(step, torch.empty(0, dtype=torch.int32))
    assert none.shape == (0, SHAPE.hidden_size)
    stacks.run_reference(step)
    for (keys, _), (expected, _) in zip(stacks.fused_caches, stacks.caches, strict=True):
        assert relative_error(keys, expected) < 1e-5


def test_a_request_does_not_depend_on_its_batch() -> None:
    stacks = make_stacks(torch.bfloat16)
    step = make_step(MIXED)
    together = stacks.run_fused(step)
    start = 0
    for row, (new, _) in enumerate(MIXED):
        rows = slice(start, start + new)
        alone = Step(
            input_ids=step.input_ids[rows],
            positions=step.positions[rows],
            slot_mapping=step.slot_mapping[rows],
            query_start_loc=torch.tensor([0, new], dtype=torch.int32),
            seq_lens=step.seq_lens[row : row + 1],
            block_tables=step.block_tables[row : row + 1],
        )
        assert torch.equal(stacks.run_fused(alone), together[rows])
        start += new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_may_bring_embeddings_and_a_rotary_table_of_its_own(dtype: torch.dtype) -> None:
    stacks = make_stacks(dtype)
    step = make_step(MIXED)
    plain = stacks.run_fused(step)
    embeddings, cos_sin = stacks.embedding[step.input_ids.long()], stacks.cos_sin[step.positions.long()]
    ids, step.input_ids = step.input_ids, torch.full_like(step.input_ids, -1)
    positions, step.positions = step.positions, torch.arange(len(ids), dtype=torch.int32)
    assert torch.equal(stacks.run_fused(step, embeddings=embeddings, cos_sin=cos_sin), plain)
    rows = torch.tensor([3, 20, 70], dtype=torch.int32)
    assert torch.equal(stacks.run_fused(step, rows, embeddings=embeddings, cos_sin=cos_sin), plain[rows])
    assert not torch.equal(stacks.run_fused(step, embeddings=embeddings, cos_sin=cos_sin.flip(0)), plain)
    step.input_ids, step.positions = ids, positions
    assert torch.equal(stacks.run_fused(step), plain)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_step_may_add_to_some_tokens_behind_the_first_layers(num_layers: int) -> None:
    stacks = make_stacks()
    step = make_step(MIXED)
    count = len(step.input_ids)
    tokens = torch.randperm(count)[: count // 2]
    wide = torch.randn(len(tokens), (num_layers + 1) * SHAPE.hidden_size)
    added = AddedRows(tokens, wide[:, SHAPE.hidden_size :])
    expected = stacks.run_reference(step, added)
    assert relative_error(stacks.run_fused(step, added=added), expected) < TOLERANCE[torch.float32]
    rows = torch.tensor([3, 20, 70], dtype=torch.int32)
    assert relative_error(stacks.run_fused(step, rows, added=added), expected[rows]) < TOLERANCE[torch.float32]
    assert (stacks.run_fused(step) - expected).abs().max() > 0.1


def test_what_is_added_is_checked() -> None:
    stacks = make_stacks()
    step = make_step([(3, 3)])
    width, tokens = SHAPE.hidden_size, torch.arange(2)
    with pytest.raises(TypeError, match="int64 token for each of 3"):
        stacks.run_fused(step, added=AddedRows(tokens, torch.zeros(3, width)))
    with pytest.raises(TypeError, match="int64 token"):
        stacks.run_fused(step, added=AddedRows(tokens.int(), torch.zeros(2, width)))
    for rows in (torch.zeros(2, width - 1), torch.zeros(2, width).half(), torch.zeros(width, 2).T):
        with pytest.raises(TypeError, match="added rows of"):
            stacks.run_fused(step, added=AddedRows(tokens, rows))
    with pytest.raises(ValueError, match="fewer than 3 layers, not 3"):
        stacks.run_fused(step, added=AddedRows(tokens, torch.zeros(2, 3 * width)))


def test_embeddings_and_tables_of_another_type_or_width_are_refused() -> None:
    stacks = make_stacks()
    step = make_step([(3, 3)])
    for embeddings in (torch.zeros(3, 72).half(), torch.zeros(3, 71), torch.zeros(72, 3).T, torch.zeros(2, 72)):
        with pytest.raises(TypeError, match="contiguous rows of 72"):
            stacks.run_fused(step, embeddings=embeddings)
    with pytest.raises(TypeError, match="contiguous rows of 16"):
        stacks.run_fused(step, cos_sin=torch.zeros(3, 16, dtype=torch.float64))


def test_wrong_sizes_are_refused() -> None:
    stacks = make_stacks()
    arguments = (pack(stacks.embedding), stacks.final_norm, stacks.cos_sin)
    with pytest.raises(ValueError, match="3 layers, not 2"):
        DenseDecoder(SHAPE, stacks.layers[:2], *arguments)
    unbound = DenseDecoder(SHAPE, stacks.layers, *arguments)
    with pytest.raises(ValueError, match="one pair of caches for each of 3 layers"):
        unbound.bind_kv_caches(stacks.caches[:2])
    with pytest.raises(ValueError, match="does not fit the decoder"):
        unbound.bind_kv_caches([ops.allocate_kv_cache(4, 16, 2, 8, torch.float32, "cpu")] * 3)
    stacks.layers[0].down = stacks.layers[0].down[:, :-1]
    with pytest.raises(ValueError, match=r"expected a matrix \[72, 100\], got \[72, 99\]"):
        DenseDecoder(SHAPE, stacks.layers, *arguments)


def test_wrong_types_are_refused() -> None:
    stacks = make_stacks()
    step = make_step([(3, 3)])
    step.positions = step.positions.long()
    with pytest.raises(TypeError, match="contiguous int32"):
        stacks.run_fused(step)
    step = make_step([(3, 3)])
    step.slot_mapping = step.slot_mapping.int()
    with pytest.raises(TypeError, match="int64 slot_mapping"):
        stacks.run_fused(step)


def test_forward_needs_caches() -> None:
    stacks = make_stacks()
    step = make_step([(3, 3)])
    stacks.fused = DenseDecoder(SHAPE, stacks.layers, pack(stacks.embedding), stacks.final_norm, stacks.cos_sin)
    with pytest.raises(RuntimeError, match="bind_kv_caches must come before forward"):
        stacks.run_fused(step)


def test_what_is_supported() -> None:
    assert DenseDecoder.supports(SHAPE, torch.bfloat16)
    assert not DenseDecoder.supports(SHAPE, torch.float16)
