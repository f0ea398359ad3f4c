import json
from pathlib import Path

import pytest
import torch

from tokenmill_engine.worker.machine_report import machine_report
from tokenmill_kernels.cpu import build as cpu_build


def test_the_report_says_what_torch_and_the_kernels_find() -> None:
    report = json.loads(json.dumps(machine_report()))
    assert report["torch"] == torch.__version__
    assert Path(report["CPU kernels"]).is_file()
    assert Path(report["C++ compiler"]).is_file()
    assert len(report["GPUs"]) == torch.cuda.device_count()


def test_kernels_that_cannot_be_built_are_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_build, "_COMPILERS", ())
    monkeypatch.delenv("CXX", raising=False)
    report = machine_report()
    assert report["CPU kernels"] == "none: no C++ compiler found (tried $CXX, g++, c++, clang++)"
    assert report["C++ compiler"] is None
