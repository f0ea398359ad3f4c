"""The prefill kernel for Hopper, which the interpreter cannot run: it compiles for the device without one."""

import logging
import sys
from pathlib import Path

import pytest

from tests.support.compiling import compiling
from tokenmill_kernels.gpu.attention import HopperPrefill

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from tokenmill_kernels.gpu.attention_prefill_hopper import hopper_prefill_kernel as kernel

descriptor = f"tensordesc<bf16[16, 64],{gl.NVMMASharedLayout(128, 16)}>"
constants = {
    "cap": None, "num_kv_heads": 8, "group": 4, "head_dim": 128, "rows": 128, "block_n": 128, "block_size": 16,
    "window": 0, "stages": 2, "slots": 2, "pdl": True,
}
types = {
    "out_ptr": "*bf16", "q_ptr": "*bf16", "k_desc": descriptor, "v_desc": descriptor, "scale": "fp32",
    "v_scale": "fp32",
}
signature, aligned = {}, {}
for index, parameter in enumerate(kernel.params):
    name = parameter.name
    kind = "*i32" if name.endswith("_ptr") else "i32"
    signature[name] = "constexpr" if name in constants else types.get(name, kind)
    if name.endswith(("_ptr", "token_stride", "head_stride")):
        aligned[(index,)] = [["tt.divisibility", 16]]
source = GluonASTSource(kernel, signature, constants, aligned)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})
print(compiled.asm["ptx"])
"""


@pytest.mark.slow
def test_it_multiplies_with_warp_groups_and_copies_with_the_accelerator(tmp_path: Path) -> None:
    result = compiling([sys.executable, "-c", COMPILE], tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "griddepcontrol.wait", "setmaxnreg"):
        assert instruction in result.stdout


def test_it_is_given_up_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    kernel = HopperPrefill()
    assert kernel.module is not None
    with caplog.at_level(logging.WARNING):
        for reason in ("no such layout", "no such copy"):
            kernel.give_up(RuntimeError(reason))
    assert kernel.module is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no such layout" in record.message
