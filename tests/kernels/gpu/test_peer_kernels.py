"""The kernels of sums through peer memory compile for a GPU, without one; `tests/engine_core/distributed` runs them in
the interpreter."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.compiling import compiling

COMPILE = """
import json
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tokenmill_kernels.gpu import peer_kernels

def compile_kernel(kernel, constants, num_warps):
    types = {"x_ptr": "*bf16", "peers_ptr": "*i64", "state_ptr": "*i32", "eps": "fp32"}
    signature, aligned = {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        kind = "*bf16" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, kind)
        if name.endswith(("_ptr", "stride", "bytes")):
            aligned[(index,)] = [["tt.divisibility", 16]]
    positions = {(index,): constants[p.name] for index, p in enumerate(kernel.params) if p.name in constants}
    source = ASTSource(kernel, signature, positions, aligned)
    options = {"num_warps": num_warps, "num_stages": 1}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

def instructions(ptx):
    return sorted(set(re.findall(r"(?:ld|st|atom|membar|fence)\\.[a-z0-9_.:]+", ptx)))

size, block = int(sys.argv[1]), 4096
common = {"size": size, "bits": tl.int16, "pdl": False}
rows = {**common, "width": block, "row_size": block, "block": block, "tile": min(size, 4)}
no_norm = dict.fromkeys(("sum_ptr", "residual_ptr", "weight_ptr"))
found = {}
for name in ("one_shot_kernel", "two_shot_kernel"):
    kernel = getattr(peer_kernels, name)
    found[name + " with norm"] = instructions(compile_kernel(kernel, {**rows, "unit": 0}, 16))
    found[name] = instructions(compile_kernel(kernel, {**rows, **no_norm, "unit": 16}, 8))
constants = {**common, "block": 2048, "unit": 16}
found["gather_kernel"] = instructions(compile_kernel(peer_kernels.gather_kernel, constants, 8))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_they_move_vectors_and_need_no_fence(size: int, tmp_path: Path) -> None:
    result = compiling([sys.executable, "-c", COMPILE, str(size)], tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    for name, instructions in json.loads(result.stdout).items():
        # What is polled comes from memory each time, and 16 bytes at once.
        volatile = [each for each in instructions if each.startswith("ld.volatile.global")]
        assert volatile == ["ld.volatile.global.v4.b32"], name
        assert "st.global.v4.b32" in instructions, name
        assert not [each for each in instructions if each.startswith(("membar", "fence"))], name
        assert [each for each in instructions if each.startswith("atom")] == ["atom.global.gpu.relaxed.add.u32"], name
