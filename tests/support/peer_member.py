"""A process that is one member of a group with peer memory: `peer_member RANK SIZE STORE_PATH DEVICE SCENARIO`, and
behind it `overlap` if kernels shall start while those before them end, `two-shot` if larger calls shall be such.

It makes the calls of the scenario and checks each against a sum in float64 of what all members have; every member can
make all of that. It writes one line of JSON before each call, what it is about to do, and one after it, a digest of the
results, which must be the same on all members. A member that a scenario holds back waits for a line in
between. A process that hangs shows where, and ends.
"""

import faulthandler
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton.language as tl

from tests.support.kernel_inputs import TOLERANCE, relative_error
from tokenmill_engine.distributed.nccl_group import exchange
from tokenmill_engine.distributed.peer_reduce import PeerReduce
from tokenmill_engine.distributed.torch_group import join
from tokenmill_engine.ipc.lifecycle import exit_at_once
from tokenmill_kernels import reference
from tokenmill_kernels.gpu import peer_kernels
from tokenmill_kernels.gpu.peer_protocol import FILL, NUM_SLOTS

HANG_S = 300.0
"""After so long a call is a failure: several processes that poll may share a core with other work."""
SMALL = {"max_bytes": 1 << 16, "one_shot_bytes": 1 << 12}
"""Sizes that keep the interpreter quick; calls are of both kinds."""
EPS = 1e-5
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KINDS = ("sum", "norm", "first norm", "gather")


@dataclass(frozen=True, slots=True)
class Call:
    """One collective."""

    kind: str
    num_rows: int
    width: int
    dtype: str
    held: int | None = None
    """The member that waits before it."""
    special: bool = False
    """Numbers that are none, and zeros and infinities of both signs."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of a call, for all members."""

    parts: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, call: Call, index: int, size: int, device: torch.device) -> "Inputs":
        generator = torch.Generator().manual_seed(index)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(DTYPES[call.dtype])

        parts = [random(call.num_rows, call.width) for _ in range(size)]
        if call.special:
            _make_special(parts)
        made = cls(parts, random(call.num_rows, call.width), random(call.width))
        return cls([part.to(device) for part in made.parts], made.residual.to(device), made.weight.to(device))


def _make_special(parts: list[torch.Tensor]) -> None:
    first, last = parts[0].view(-1), parts[-1].view(-1)
    bits = torch.int32 if first.element_size() == 4 else torch.int16
    first[0], first[1], first[2], last[2] = float("nan"), float("inf"), float("inf"), float("-inf")
    first.view(bits)[3] = -1  # the pattern of empty places
    for part in parts:
        part.view(-1)[4] = -0.0


def scenario(name: str, size: int) -> Iterator[Call]:
    """The calls of a scenario."""
    generator = torch.Generator().manual_seed(len(name))

    def choose(*options: int) -> int:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    names = list(DTYPES)
    match name:
        case "every shape":
            for width in (1, 8, 33, 1000):
                for index, dtype in enumerate(names):
                    yield from (Call(kind, 1 + (width + index) % 7, width, dtype) for kind in KINDS)
        case "any order":
            for _ in range(40):
                kind, dtype = KINDS[choose(0, 1, 2, 3)], names[choose(0, 1, 2)]
                yield Call(kind, choose(1, 2, 3, 5, 9), choose(8, 33, 64, 576, 1200), dtype)
        case "late":
            for index in range(8):
                yield Call(KINDS[index % 4], choose(1, 5, 9), choose(64, 576), names[index % 3], held=index % size)
        case "special":
            for dtype in names:
                yield from (Call(kind, 1, 64, dtype, special=True) for kind in KINDS)
                yield Call("norm", 40, 64, dtype, special=True)
                yield Call("sum", 2, 64, dtype)
        case "wide":
            for num_rows in (1, 7, 32, 133, 256, 300):
                for width, dtype in ((4096, "bfloat16"), (5120, "float16"), (1000, "float32")):
                    kinds = KINDS if num_rows < 100 else KINDS[:-1]
                    yield from (Call(kind, num_rows, width, dtype) for kind in kinds)
        case "on GPUs":
            for part in ("late", "special", "wide"):
                yield from scenario(part, size)
        case _:
            raise ValueError(name)


def run(call: Call, inputs: Inputs, rank: int, peers: PeerReduce) -> list[torch.Tensor]:
    """Results of one member. What must not change is checked."""
    own = inputs.parts[rank]
    assert peers.takes(own), "too large"
    if call.kind == "gather":
        return [peers.all_gather(own)]
    if call.kind == "sum":
        x = own.clone()
        assert peers.all_reduce(x) is x
        return [x]
    # Rows with gaps, and numbers in them that must neither be read nor written.
    wide = torch.full((call.num_rows + 1, call.width + 3), float("nan"), dtype=own.dtype, device=own.device)
    x, out = wide.clone()[: call.num_rows, : call.width], wide.clone()
    x.copy_(own)
    residual = None if call.kind == "first norm" else inputs.residual.clone()
    normed, total = peers.add_rms_norm(x, residual, inputs.weight, EPS, out[: call.num_rows, : call.width])
    assert residual is None or total is residual
    assert normed.data_ptr() == out.data_ptr()
    assert _bits(x).equal(_bits(own)), "the input was changed"
    assert out[call.num_rows :].isnan().all(), "rows after the last were written"
    assert out[:, call.width :].isnan().all(), "columns after the last were written"
    return [normed.contiguous(), total]


def expected(call: Call, inputs: Inputs, total: torch.Tensor) -> list[torch.Tensor]:
    """Results in float64; the norm is of `total`, whose rounding is seen in it."""
    if call.kind == "gather":
        return [torch.cat(inputs.parts, dim=1).double()]
    exact = torch.stack([part.double() for part in inputs.parts]).sum(dim=0)
    if call.kind == "sum":
        return [exact]
    if call.kind == "norm":
        exact += inputs.residual.double()
    return [reference.rms_norm(total.double(), inputs.weight.double(), EPS), exact]


def check(call: Call, inputs: Inputs, results: list[torch.Tensor]) -> None:
    """Raises AssertionError."""
    for actual, exact in zip(results, expected(call, inputs, results[-1]), strict=True):
        dtype = DTYPES[call.dtype]
        assert (actual.shape, actual.dtype) == (exact.shape, dtype)
        finite = exact.isfinite()
        assert actual.isnan().equal(exact.isnan()), "not the same places are no numbers"
        assert actual[~finite & ~exact.isnan()].double().equal(exact[~finite & ~exact.isnan()])
        error = relative_error(actual[finite], exact[finite])
        limit = 0.0 if call.kind == "gather" else TOLERANCE[dtype]
        assert error <= limit, f"relative error {error:.2e}"


def check_cleared(peers: PeerReduce) -> None:
    """The slot of the call before the last one is empty."""
    slots = peers._memory.own.view(NUM_SLOTS, -1)
    next_slot = int(peers._peers.state[0])
    assert (slots[(next_slot + 1) % NUM_SLOTS] == FILL).all(), "a slot is not empty"


def digest(results: list[torch.Tensor]) -> str:
    """Of the bits; not of those of NaNs."""
    sha = hashlib.sha256()
    for result in results:
        sha.update(_bits(result.nan_to_num(nan=7.0)).cpu().numpy().tobytes())
    return sha.hexdigest()


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def say(value: object) -> None:
    """One line; the process has so long again."""
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    print(json.dumps(value), flush=True)  # noqa: T201


def make_calls(name: str, rank: int, size: int, device: torch.device, peers: PeerReduce) -> None:
    """Those of a scenario."""
    for index, call in enumerate(scenario(name, size)):
        inputs = Inputs.of(call, index, size, device)
        say({"begins": asdict(call)})
        if call.held == rank:
            sys.stdin.readline()
        results = run(call, inputs, rank, peers)
        if device.type == "cuda":
            torch.cuda.synchronize()
        check(call, inputs, results)
        check_cleared(peers)
        say({"digest": digest(results)})


def main(make: Callable[[str, int, int, torch.device, PeerReduce], None] = make_calls) -> None:
    rank, size, store_path, kind, name = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:6]
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.set_num_threads(1)
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if kind == "cpu":
        # Kernels look at what is there whenever a sum is no number: with patience no test would be long enough.
        peer_kernels._PATIENCE = tl.constexpr(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = join(rank, size, store_path)
    options = sys.argv[6:]
    limits = SMALL if kind == "cpu" else {"one_shot_bytes": 1 << 12} if "two-shot" in options else {}
    overlap = "overlap" in options
    peers = PeerReduce(rank, size, device, lambda data: exchange(group, data), overlap=overlap, **limits)
    with torch.inference_mode():
        make(name, rank, size, device, peers)
    # Nobody leaves before all are done: others may still push.
    group.agree_min(0)
    say({"done": True})
    # As workers end: gloo's threads may still be at work.
    exit_at_once(0)


if __name__ == "__main__":
    main()
