"""Times the Triton kernels at the shapes of an 8B and a 1B Llama against what the card can do.

    python -m benchmarks.kernels_gpu [--sweep] [--json FILE]

Each figure is the median over replays of a CUDA graph that walks several sets of random inputs, larger together than
the L2 cache unless they are tiny. The floor of an operation is the bytes it must move over the bandwidth of a device
copy, measured first; prefill attention is bound by arithmetic, so its rate is shown. Attention is timed for all layers
of a model, which share one plan. `--sweep` times attention with other tiles as well, prefill by the portable kernel.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.errors import TritonError

from tokenmill_kernels import ops
from tokenmill_kernels.gpu import activation, attention, norm, rotary
from tokenmill_kernels.gpu.attention_tiles import TileConfig
from tokenmill_kernels.gpu.launch import COMPILE_OPTIONS

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
HIDDEN, INTERMEDIATE = 4096, 14336
CONTEXT = 1088
ROTATED_BYTES = 400 << 20
DTYPE, ITEM_BYTES = torch.bfloat16, 2

DECODE_BATCHES = (1, 8, 32, 128, 256)
PREFILLS = ((8, 1024, 1024), (16, 1024, 1024), (1, 8192, 8192), (1, 2048, 32768))
"""(requests, new tokens of each, tokens of each after the step)"""


@dataclass(frozen=True, slots=True)
class Model:
    """What attention needs to know of a model; both have the heads of a Llama."""

    name: str
    num_layers: int
    head_dim: int


MODELS = (Model("8B", 32, HEAD_DIM), Model("1B", 16, 64))

DECODE_TILES = [
    TileConfig(16, block_n, num_warps, num_stages, programs)
    for block_n, num_warps, num_stages, programs in (
        (64, 4, 5, 2), (64, 4, 5, 3), (64, 4, 5, 4), (64, 4, 7, 1), (64, 4, 7, 2), (64, 4, 3, 4), (64, 2, 5, 3),
        (64, 8, 5, 2), (32, 4, 5, 4), (32, 4, 7, 4), (32, 2, 5, 6), (128, 4, 5, 1), (128, 8, 5, 1), (128, 4, 4, 2),
    )
]  # fmt: skip
PREFILL_TILES = [
    TileConfig(block_m, block_n, num_warps, num_stages)
    for block_m, block_n, num_warps, num_stages in (
        (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (128, 32, 8, 5), (128, 64, 4, 3), (64, 64, 4, 3),
        (64, 64, 4, 5), (64, 128, 4, 3), (256, 64, 8, 3),
    )
]  # fmt: skip


def median_ms(calls: Sequence[Callable[[], object]], first: Callable[[], object] | None = None) -> float:
    """Median milliseconds of one of `calls`, from a graph of all of them, with `first` at its beginning."""
    calls_in_order = [*([] if first is None else [first]), *calls]
    for call in calls_in_order:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls_in_order:
            call()
    for _ in range(3):
        graph.replay()
    times: list[float] = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes per second of a device copy, read and written bytes both counted."""
    source = torch.randint(0, 127, (2 << 30,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_ms([lambda: target.copy_(source)] * 4) / 1e3)


def num_sets(bytes_each: int) -> int:
    """How many input sets a measurement walks."""
    return min(max(-(-ROTATED_BYTES // bytes_each), 2), 64)


class AttentionLoad:
    """Equal requests with scattered blocks, and several caches to walk through."""

    def __init__(self, model: Model, num_requests: int, query_len: int, seq_len: int) -> None:
        blocks_each = -(-seq_len // BLOCK_SIZE)
        num_blocks = num_requests * blocks_each
        self._lengths: dict[str, Any] = {
            "query_start_loc": torch.arange(0, num_requests + 1, dtype=torch.int32, device="cuda") * query_len,
            "seq_lens": torch.full((num_requests,), seq_len, dtype=torch.int32, device="cuda"),
        }
        self._hints: dict[str, Any] = {"num_decodes": num_requests if query_len == 1 else 0, "max_query_len": query_len}
        self._block_tables = torch.randperm(num_blocks, device="cuda").int().view(num_requests, blocks_each)
        self._q = torch.randn(num_requests * query_len, NUM_HEADS, model.head_dim, device="cuda").to(DTYPE)
        self._out = torch.empty_like(self._q)
        self._plan: ops.AttentionPlan | None = None
        self._caches = []
        for _ in range(num_sets(2 * num_blocks * BLOCK_SIZE * NUM_KV_HEADS * model.head_dim * ITEM_BYTES)):
            caches = ops.allocate_kv_cache(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, model.head_dim, DTYPE, "cuda")
            for cache in caches:
                cache.transpose(1, 2).normal_()
            self._caches.append(caches)

    def plan(self) -> None:
        """Makes the plan that the layers read, and launches something before they do, as a model would."""
        self._plan = ops.plan_attention(
            **self._lengths,
            **self._hints,
            num_tokens=self._q.shape[0],
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=self._q.shape[2],
            dtype=DTYPE,
            window=None,
        )
        self._out.zero_()

    def attend(self, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """One layer."""
        k_cache, v_cache = caches
        return ops.paged_attention(
            self._q,
            k_cache,
            v_cache,
            **self._lengths,
            **self._hints,
            block_tables=self._block_tables,
            max_seq_len=self._block_tables.shape[1] * BLOCK_SIZE,
            scale=self._q.shape[2] ** -0.5,
            out=self._out,
            plan=self._plan,
        )

    def layer_ms(self) -> float:
        """Milliseconds of one layer."""
        return median_ms([partial(self.attend, caches) for caches in self._caches], self.plan)


def decode_row(model: Model, batch: int, bandwidth: float) -> dict[str, object]:
    """Decode attention of all layers against its floor."""
    milliseconds = model.num_layers * AttentionLoad(model, batch, 1, CONTEXT).layer_ms()
    heads = 2 * CONTEXT * NUM_KV_HEADS + 2 * NUM_HEADS
    floor = model.num_layers * batch * heads * model.head_dim * ITEM_BYTES / bandwidth * 1e3
    name = f"{model.name}: decode attention, {model.num_layers} layers, batch {batch}"
    return {"op": name, "ms": milliseconds, "floor_ms": floor}


def prefill_row(model: Model, num_requests: int, query_len: int, seq_len: int) -> dict[str, object]:
    """Prefill attention of all layers."""
    milliseconds = AttentionLoad(model, num_requests, query_len, seq_len).layer_ms()
    pairs = num_requests * (query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2)
    rate = 4 * pairs * NUM_HEADS * model.head_dim / (milliseconds / 1e3) / 1e12
    name = f"{model.name}: prefill attention, {model.num_layers} layers, {num_requests} x {query_len} of {seq_len}"
    return {"op": name, "ms": model.num_layers * milliseconds, "tflops": rate}


def elementwise_calls(num_tokens: int) -> dict[str, tuple[int, Callable[[], Callable[[], object]]]]:
    """By name: bytes one call must move, and a function that makes a call with inputs of its own."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(DTYPE)

    def add_norm() -> Callable[[], object]:
        x, residual, weight = random(num_tokens, HIDDEN), random(num_tokens, HIDDEN), random(HIDDEN)
        return lambda: ops.add_rms_norm(x, residual, weight, 1e-5)

    def silu() -> Callable[[], object]:
        gate_up = random(num_tokens, 2 * INTERMEDIATE)
        return lambda: ops.silu_mul(gate_up)

    def rotate() -> Callable[[], object]:
        sizes = [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS]
        q, k, v = torch.split(random(num_tokens, sum(sizes), HEAD_DIM), sizes, dim=1)
        caches = ops.allocate_kv_cache(-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, DTYPE, "cuda")
        table = torch.randn(8192, HEAD_DIM, device="cuda")
        positions = torch.randint(0, 8192, (num_tokens,), dtype=torch.int32, device="cuda")
        slots = torch.randperm(num_tokens, device="cuda")
        return lambda: ops.rotary_kv_write(q, k, v, table, positions, slots, *caches, early=True)

    row = num_tokens * ITEM_BYTES
    heads = 2 * NUM_HEADS + 5 * NUM_KV_HEADS
    return {
        "add_rms_norm": (4 * row * HIDDEN, add_norm),
        "silu_mul": (3 * row * INTERMEDIATE, silu),
        "rotary_kv_write": (row * heads * HEAD_DIM + 4 * num_tokens * HEAD_DIM, rotate),
    }


def elementwise_rows(num_tokens: int, bandwidth: float) -> Iterator[dict[str, object]]:
    """Norm, activation and rotary embedding of one layer."""
    for name, (moved, make) in elementwise_calls(num_tokens).items():
        milliseconds = median_ms([make() for _ in range(num_sets(moved))])
        yield {
            "op": f"{name}, {num_tokens} tokens",
            "ms": milliseconds,
            "floor_ms": moved / bandwidth * 1e3,
            "gb_per_s": moved / milliseconds / 1e6,
        }


def chain_row(num_tokens: int, *, dependent: bool) -> dict[str, object]:
    """The small kernels of one layer in the order of use, each of which may start before the one before it is done
    if `dependent` (and if the device can)."""
    kernels = elementwise_calls(num_tokens)
    order = ("add_rms_norm", "rotary_kv_write", "add_rms_norm", "silu_mul")
    moved = sum(kernels[name][0] for name in order)
    with ExitStack() as stack:
        for module in () if dependent else (activation, norm, rotary):
            options = COMPILE_OPTIONS | {"pdl": False}
            stack.enter_context(mock.patch.object(module, "launch_options", return_value=options))
        calls = [kernels[name][1]() for _ in range(num_sets(moved)) for name in order]
        milliseconds = len(order) * median_ms(calls)
    start = "dependent" if dependent else "one by one"
    return {"op": f"small kernels of a layer, {start}, {num_tokens} tokens", "ms": milliseconds}


@contextmanager
def tiles(function: str, config: TileConfig) -> Iterator[None]:
    """Lets `function` of the attention module choose `config`, and the portable kernels serve it."""
    with (
        mock.patch.object(attention, function, return_value=config),
        mock.patch.object(attention, "_hopper", return_value=None),
    ):
        yield


def sweep_rows(bandwidth: float) -> Iterator[dict[str, object]]:
    """Attention with each of the listed tiles; one that does not fit the card is reported as such."""
    for model in MODELS:
        for config in DECODE_TILES:
            for batch in (1, 32, 256):
                yield swept("decode_config", config, partial(decode_row, model, batch, bandwidth))
        for config in PREFILL_TILES:
            for prefill in PREFILLS[::2]:
                yield swept("prefill_config", config, partial(prefill_row, model, *prefill))


def swept(function: str, config: TileConfig, measure: Callable[[], dict[str, object]]) -> dict[str, object]:
    """One row of a sweep, named after its tiles."""
    name = (
        f"m {config.block_m} n {config.block_n} warps {config.num_warps} stages {config.num_stages} "
        f"programs {config.programs_per_sm}"
    )
    try:
        with tiles(function, config):
            row = measure()
    except TritonError as error:
        return {"op": f"{function} {name}", "failed": str(error).splitlines()[0][:80]}
    return row | {"op": f"{row['op']}: {name}"}


def rows(sweep: bool) -> Iterator[dict[str, object]]:
    """Every row of the table, in order."""
    bandwidth = copy_bandwidth()
    yield {"op": "device copy", "gb_per_s": bandwidth / 1e9}
    for num_tokens in (1, 256, 8192):
        yield from elementwise_rows(num_tokens, bandwidth)
    for num_tokens in (1, 32, 256):
        for dependent in (False, True):
            yield chain_row(num_tokens, dependent=dependent)
    for model in MODELS:
        for batch in DECODE_BATCHES:
            yield decode_row(model, batch, bandwidth)
        for prefill in PREFILLS:
            yield prefill_row(model, *prefill)
    if sweep:
        yield from sweep_rows(bandwidth)


def formatted(row: dict[str, object]) -> str:
    """One line of the table; empty where a column has no meaning."""
    ms, floor = row.get("ms"), row.get("floor_ms")
    ratio = ms / floor if isinstance(ms, float) and isinstance(floor, float) else None
    cells = (
        (ms, "9.4f"), (floor, "9.4f"), (ratio, "6.2f"), (row.get("gb_per_s"), "7.0f"), (row.get("tflops"), "6.0f"),
    )  # fmt: skip
    text = "  ".join(" " * int(form.split(".")[0]) if value is None else format(value, form) for value, form in cells)
    return f"{row['op']!s:<86}{text}  {row.get('failed', '')}".rstrip()


def print_table(
    measured: Iterator[dict[str, object]],
    json_file: Path | None,
    heading: str = "",
    line: Callable[[dict[str, object]], str] = formatted,
) -> None:
    """Prints the card, `heading` and the `line` of each row as it is measured; all rows go to `json_file` if there is
    one."""
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n{heading}")
    table = []
    for row in measured:
        table.append(row)
        sys.stdout.write(line(row) + "\n")
        sys.stdout.flush()
    if json_file is not None:
        json_file.write_text(json.dumps({"card": torch.cuda.get_device_name(), "rows": table}, indent=1))


def main() -> None:
    """Prints the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time attention with other tiles too")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print_table(
        rows(arguments.sweep),
        arguments.json,
        f"{'':<86}{'ms':>9}  {'floor ms':>9}  {'x':>6}  {'GB/s':>7}  {'TF/s':>6}\n",
    )


if __name__ == "__main__":
    main()
