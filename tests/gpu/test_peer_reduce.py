"""Sums through peer memory on several GPUs of one host, a process each, in graphs and outside of them."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.support.peer_processes import PeerProcesses, run_scenario


def _sizes() -> list[object]:
    num_gpus = torch.cuda.device_count()
    return [
        pytest.param(size, marks=pytest.mark.skipif(num_gpus < size, reason=f"needs {size} GPUs")) for size in (2, 4)
    ]


pytestmark = pytest.mark.gpu
sizes = pytest.mark.parametrize("size", _sizes())
options = pytest.mark.parametrize("option", ["plain", "two-shot", "overlap"])


@sizes
@options
def test_members_get_the_sum_with_the_same_bits(tmp_path: Path, size: int, option: str) -> None:
    run_scenario(size, tmp_path, "cuda", "on GPUs", option)


@sizes
@options
def test_graphs_in_any_order(tmp_path: Path, size: int, option: str) -> None:
    """Nothing is wrong in any of more than a thousand replays; if something is, it is said from when on."""
    wrong: list[tuple[int, dict[str, list[list[int]]]]] = []

    def on_line(rank: int, said: dict[str, list[list[int]]]) -> None:
        if any(map(any, said.get("wrong", []))):
            wrong.append((rank, said))

    with closing(PeerProcesses("tests.support.peer_graphs", size, tmp_path, "cuda", "graphs", option)) as processes:
        processes.run(on_line)
    assert not wrong, f"first: {wrong[0]}"
