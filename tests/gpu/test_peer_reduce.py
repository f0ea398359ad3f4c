"""Sums through peer memory on several GPUs of one host, a process each, in graphs and outside of them."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.support.peer_processes import PeerProcesses, run_scenario

SIZE = max((size for size in (2, 4, 8) if size <= torch.cuda.device_count()), default=0)
"""Members: all GPUs there are, or nearly."""

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SIZE == 0, reason="needs 2 GPUs")]
options = pytest.mark.parametrize("option", ["plain", "two-shot", "overlap"])


@options
def test_members_get_the_sum_with_the_same_bits(tmp_path: Path, option: str) -> None:
    run_scenario(SIZE, tmp_path, "cuda", "on GPUs", option)


@options
def test_graphs_in_any_order(tmp_path: Path, option: str) -> None:
    """Nothing is wrong in any of more than a thousand replays; if something is, it is said from when on."""
    wrong: list[tuple[int, dict[str, list[list[int]]]]] = []

    def on_line(rank: int, said: dict[str, list[list[int]]]) -> None:
        if any(map(any, said.get("wrong", []))):
            wrong.append((rank, said))

    with closing(PeerProcesses("tests.support.peer_graphs", SIZE, tmp_path, "cuda", "graphs", option)) as processes:
        processes.run(on_line)
    assert not wrong, f"first: {wrong[0]}"
