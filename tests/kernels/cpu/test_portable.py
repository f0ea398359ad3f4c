"""The library compiled for processors without AVX-512: the same sources take other branches, the same tests hold."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

BUILD_AND_TEST = """
import sys
import pytest
from tokenmill_kernels.cpu import build

build.FLAGS = tuple(sys.argv[1] if flag == "-march=native" else flag for flag in build.FLAGS)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""

FILES = [f"tests/kernels/cpu/test_{name}.py" for name in ("elementwise", "linear", "attention", "decoder")]


@pytest.mark.slow
def test_without_avx512(tmp_path: Path) -> None:
    target = "-march=x86-64-v3" if platform.machine() == "x86_64" else "-march=native"
    result = subprocess.run(
        [sys.executable, "-c", BUILD_AND_TEST, target, *FILES],
        env=os.environ | {"TOKENMILL_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert "passed" in result.stdout
    assert len(list(tmp_path.glob("*.so"))) == 1
