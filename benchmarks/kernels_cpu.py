"""Times the fused CPU decoder with random weights: decode steps by batch size and prefill by length, LM head included.

    python benchmarks/kernels_cpu.py [--threads N] [--repeats N] [--dtype bfloat16|float32] [--json FILE]

The shape is SmolLM2-135M's. A decode step is the stack, the LM head and the greedy choice for every request;
a prefill is the stack over all prompts at once, and the choice for the last token of each. Minimum and median of the
repeats are printed: other work on the machine only ever adds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from tokenmill_kernels import ops
from tokenmill_kernels.cpu.decoder import DecoderLayerWeights, DecoderShape, DenseDecoder
from tokenmill_kernels.cpu.library import load, set_num_threads
from tokenmill_kernels.cpu.packed import PackedWeight, pack

SHAPE = DecoderShape(
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    scale=64**-0.5,
)
VOCAB_SIZE = 49152
BLOCK_SIZE = 16
MAX_POSITION = 8192


class Model:
    """A random decoder with its caches, and the tables that one batch of requests needs."""

    def __init__(self, dtype: torch.dtype, num_blocks: int) -> None:
        self.embedding: PackedWeight = pack(random_matrix(VOCAB_SIZE, SHAPE.hidden_size, dtype))
        angles = torch.outer(torch.arange(MAX_POSITION).float(), 1e5 ** (-torch.arange(0, 64, 2) / 64))
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        norm = torch.ones(SHAPE.hidden_size, dtype=dtype)
        self.decoder = DenseDecoder(SHAPE, random_layers(dtype), self.embedding, norm, cos_sin)
        self.decoder.bind_kv_caches(
            [
                ops.allocate_kv_cache(num_blocks, BLOCK_SIZE, SHAPE.num_kv_heads, SHAPE.head_dim, dtype, "cpu")
                for _ in range(SHAPE.num_layers)
            ]
        )
        self.num_blocks = num_blocks

    def step(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> Callable[[], torch.Tensor]:
        """A function that runs one step over requests with these new tokens and these lengths after the step."""
        lengths, news = torch.tensor(seq_lens, dtype=torch.int32), torch.tensor(query_lens, dtype=torch.int32)
        starts = torch.cat((torch.zeros(1), news.cumsum(0))).int()
        blocks_each = -(-max(seq_lens) // BLOCK_SIZE)
        tables = torch.randperm(self.num_blocks)[: len(seq_lens) * blocks_each].int().view(len(seq_lens), -1)
        positions = torch.cat([torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)])
        requests = torch.repeat_interleave(torch.arange(len(seq_lens)), news)
        slots = tables[requests, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        ids = torch.randint(0, VOCAB_SIZE, (len(positions),), dtype=torch.int32)
        positions = positions.int()
        rows = starts[1:] - 1

        def run() -> torch.Tensor:
            hidden = self.decoder.forward(
                ids,
                positions,
                slots,
                query_start_loc=starts,
                seq_lens=lengths,
                block_tables=tables,
                output_rows=rows,
            )
            return ops.linear_argmax(hidden, self.embedding)

        return run


def random_matrix(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    scale: float = in_features**-0.5
    return (torch.randn(out_features, in_features) * scale).to(dtype)


def random_layers(dtype: torch.dtype) -> Iterator[DecoderLayerWeights]:
    hidden, inner = SHAPE.hidden_size, SHAPE.intermediate_size
    for _ in range(SHAPE.num_layers):
        yield DecoderLayerWeights(
            input_norm=torch.ones(hidden),
            qkv=random_matrix(SHAPE.qkv_size, hidden, dtype),
            output=random_matrix(hidden, SHAPE.attended_size, dtype),
            post_attention_norm=torch.ones(hidden),
            gate=random_matrix(inner, hidden, dtype),
            up=random_matrix(inner, hidden, dtype),
            down=random_matrix(hidden, inner, dtype),
        )


def measure(run: Callable[[], torch.Tensor], repeats: int) -> dict[str, float]:
    """Milliseconds of one call."""
    run()
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return {"min_ms": round(min(times), 2), "median_ms": round(statistics.median(times), 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="threads of the library (default: one per processor)")
    parser.add_argument("--repeats", type=int, default=20, help="calls per measurement")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if load() is None:
        return 1
    if arguments.threads is not None:
        set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = Model(getattr(torch, arguments.dtype), num_blocks=8192)
    cases = {f"decode, batch {batch}, context 300": ([1] * batch, [300] * batch) for batch in (1, 2, 4, 8, 16, 32, 64)}
    cases["decode, batch 1, context 8000"] = ([1], [8000])
    cases |= {f"prefill, 1 x {length}": ([length], [length]) for length in (32, 256, 1500, 2048)}
    cases["prefill, 8 x 256"] = ([256] * 8, [256] * 8)
    cases["mixed, 31 decodes + 256 new tokens"] = ([1] * 31 + [256], [300] * 31 + [256])
    results: dict[str, dict[str, float]] = {}
    for name, (query_lens, seq_lens) in cases.items():
        repeats = arguments.repeats if sum(query_lens) <= 256 else max(3, arguments.repeats // 4)
        results[name] = measure(model.step(query_lens, seq_lens), repeats)
        result = results[name]
        sys.stdout.write(f"{name:40} min {result['min_ms']:8.2f} ms   median {result['median_ms']:8.2f} ms\n")
        sys.stdout.flush()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
