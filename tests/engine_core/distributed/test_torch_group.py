"""Gloo groups: in threads, which are members as good as processes; and in processes, some of which are killed."""

import json
import select
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL
from typing import TypeVar

import psutil
import pytest
import torch

from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.distributed.torch_group import TorchGroup, join
from tokenmill_engine.errors import EngineDeadError, StartupError

Result = TypeVar("Result")

ROOT = Path(__file__).parents[3]
SIZE = 3
_DEADLINE_S = 120.0


def in_threads(tmp_path: Path, work: Callable[[TorchGroup], Result], size: int = SIZE) -> list[Result]:
    """What `work` gives on each member. Each begins when all have joined: one that had left by then would seem to end
    while others still connect."""
    joined = threading.Barrier(size)

    def run(rank: int) -> Result:
        try:
            group = join(rank, size, tmp_path / "store")
        except BaseException:
            joined.abort()
            raise
        try:
            joined.wait(120.0)
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def values(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_have_the_same_bits_everywhere(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    shapes = [(1,), (7, 3), (33, 576)]

    def work(group: Group) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [group.all_reduce(values(group.rank, *shape).to(dtype)) for shape in shapes]

    results = in_threads(tmp_path, work, size)
    for index, shape in enumerate(shapes):
        exact = sum(values(rank, *shape).to(dtype).double() for rank in range(size))
        tolerance = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
        assert isinstance(exact, torch.Tensor)
        torch.testing.assert_close(results[0][index].double(), exact, atol=tolerance, rtol=tolerance)
        for result in results:
            assert torch.equal(result[index], results[0][index])


def test_a_sum_with_what_is_no_number_is_none_on_every_member(tmp_path: Path) -> None:
    def work(group: Group) -> torch.Tensor:
        return group.all_reduce(torch.tensor([1.0, float("nan") if group.rank == 1 else 0.0]))

    for result in in_threads(tmp_path, work):
        assert result[0] == SIZE
        assert result[1].isnan()


@pytest.mark.parametrize("num_rows", [1, 5])
def test_gathered_rows_are_by_rank_along_the_last_dimension(tmp_path: Path, num_rows: int) -> None:
    expected = torch.cat([values(rank, num_rows, 4) for rank in range(SIZE)], dim=1)
    for result in in_threads(tmp_path, lambda group: group.all_gather(values(group.rank, num_rows, 4))):
        assert torch.equal(result, expected)
        assert result.is_contiguous()


def test_what_is_gathered_may_have_gaps(tmp_path: Path) -> None:
    expected = torch.cat([values(rank, 5, 4)[:, ::2] for rank in range(SIZE)], dim=1)
    for result in in_threads(tmp_path, lambda group: group.all_gather(values(group.rank, 5, 4)[:, ::2])):
        assert torch.equal(result, expected)


def test_nothing_can_be_summed_and_gathered_too(tmp_path: Path) -> None:
    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sums, rows = group.all_reduce(torch.empty(0, 5)), group.all_gather(torch.empty(0, 5))
        return sums, rows, group.all_reduce(torch.ones(1))

    for sums, rows, after in in_threads(tmp_path, work):
        assert (sums.shape, rows.shape, after.item()) == ((0, 5), (0, 5 * SIZE), SIZE)


def test_the_smallest_number_is_agreed_on(tmp_path: Path) -> None:
    assert in_threads(tmp_path, lambda group: group.agree_min((1 << 60) - group.rank)) == [(1 << 60) - 2] * SIZE


def test_what_is_sent_on_comes_with_its_tag(tmp_path: Path) -> None:
    """In any order of tags; they may be larger than gloo's."""
    tags = [0, 7, 2**31 - 1, 2**31 + 1, 2**40 + 2]

    def work(group: TorchGroup) -> list[int]:
        if group.rank == 0:
            for tag in tags:
                group.send(torch.tensor([tag]), tag)
            received = tags
        else:
            received = [int(group.receive(torch.zeros(1, dtype=torch.int64), tag)) for tag in reversed(tags)][::-1]
            for tag in received if group.rank < SIZE - 1 else ():
                group.send(torch.tensor([tag]), tag)
        group.agree_min(0)  # nobody leaves before all have come so far
        return received

    assert in_threads(tmp_path, work) == [tags] * SIZE


def test_who_waits_for_one_that_left_hears_of_it(tmp_path: Path) -> None:
    """Also at once, when that is known already."""

    def work(group: TorchGroup) -> int:
        num_errors = 0
        for tag in range(3 * group.rank):
            with pytest.raises(EngineDeadError, match=r"^worker 1 lost the connection to another worker$"):
                group.receive(torch.zeros(1), tag)
            num_errors += 1
        return num_errors

    assert in_threads(tmp_path, work, size=2) == [0, 3]


@pytest.mark.slow
def test_late_members_are_waited_for(tmp_path: Path) -> None:
    """The time to join is no limit to the calls."""
    release = threading.Event()

    def run(rank: int) -> int:
        group = join(rank, 2, tmp_path / "store", timeout_s=3.0)
        if rank == 1:
            # Longer than the time to join: nothing comes to end this wait.
            release.wait(3.5)
        agreed = group.agree_min(rank)
        group.close()
        return agreed

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [0, 0]


def test_two_groups_in_one_process_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()

    def work(offset: int) -> list[int]:
        folder = tmp_path / ("a" if offset == 0 else "b")
        return in_threads(folder, lambda group: group.agree_min(offset + group.rank), size=2)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (0, 100))) == [[0, 0], [100, 100]]


@pytest.mark.slow
def test_members_that_do_not_come_are_named(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        join(rank, 4, tmp_path / "store", timeout_s=2.0, names=[f"3.{each}" for each in range(4)])

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, rank) for rank in (0, 2)]
    for future in futures:
        with pytest.raises(StartupError, match=r"^workers 3\.1, 3\.3 did not join the others within 2 s$"):
            future.result()


def test_a_folder_that_is_not_there_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^worker 0 cannot join the others: the folder .*nowhere is gone$"):
        join(0, 2, tmp_path / "nowhere" / "store", timeout_s=0.5)


NO_LOOPBACK = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tokenmill_engine.distributed.torch_group import join
from tokenmill_engine.errors import StartupError

def run(rank):
    try:
        join(rank, 2, Path(sys.argv[1]), names=["3.0", "3.1"])
    except StartupError as error:
        return str(error)

with ThreadPoolExecutor(2) as pool:
    print(*pool.map(run, range(2)), sep="\\n")
"""


@pytest.mark.slow
def test_a_machine_without_a_loopback_interface_is_told_of(tmp_path: Path) -> None:
    isolated = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], check=False, stderr=DEVNULL).returncode:
        pytest.skip("no network namespace can be made here")
    done = subprocess.run(
        [*isolated, sys.executable, "-c", NO_LOOPBACK, str(tmp_path / "store")],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    reason = "this machine has no working loopback interface (127.0.0.1)"
    assert done.stdout.splitlines() == [f"worker 3.{rank} cannot join the others: {reason}" for rank in range(2)]


def test_a_host_name_that_does_not_resolve_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would look the name up, or take the interface that this names, if it were not told where to listen."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface0")
    assert in_threads(tmp_path, lambda group: group.agree_min(group.rank), size=2) == [0, 0]


def test_only_this_machine_can_connect_and_nothing_is_left(tmp_path: Path) -> None:
    def listening(_: Group) -> set[str]:
        return {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}

    before = listening(ALONE)
    for addresses in in_threads(tmp_path, listening):
        assert addresses - before <= {"127.0.0.1"}
    assert list(tmp_path.iterdir()) == []


def test_a_worker_alone_has_what_it_had() -> None:
    x = torch.ones(2, 3)
    assert (ALONE.rank, ALONE.size, ALONE.agree_min(7)) == (0, 1, 7)
    assert ALONE.all_reduce(x) is x
    assert ALONE.all_gather(x) is x


class Members:
    """Processes of `tests.support.group_member`."""

    def __init__(self, folder: Path) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.group_member", str(rank), str(SIZE), str(folder / "store")],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(SIZE)
        ]

    def ask(self, rank: int, call: str) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(call + "\n")
        stdin.flush()

    def answer(self, *ranks: int) -> tuple[int, object]:
        """Of the first of `ranks` that has one, with its rank. Members answer in single lines."""
        outputs = {self.processes[rank].stdout: rank for rank in ranks}
        ready, _, _ = select.select(list(outputs), [], [], _DEADLINE_S)
        assert ready, f"no answer from {ranks}"
        return outputs[ready[0]], json.loads(ready[0].readline())

    def all(self, call: str) -> list[object]:
        for rank in range(SIZE):
            self.ask(rank, call)
        return self.answers()

    def answers(self) -> list[object]:
        return [self.answer(rank)[1] for rank in range(SIZE)]

    def end(self, rank: int) -> int:
        """Exit code of a member that has nothing more to do."""
        process = self.processes[rank]
        assert process.stdin is not None
        process.stdin.close()
        return process.wait(_DEADLINE_S)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    members = Members(tmp_path)
    try:
        yield members
    finally:
        members.kill()


@pytest.mark.slow
def test_processes_agree_to_the_last_bit_until_one_is_killed(members: Members) -> None:
    """Whoever waits for the dead one fails, and may leave; then whoever waits for that one fails too."""
    assert members.answers() == ["joined"] * SIZE
    sums = members.all("sum")
    assert sums[0] == sums[1] == sums[2]
    assert members.all("min") == [100 - (SIZE - 1)] * SIZE
    members.ask(0, "sum")
    members.processes[1].kill()
    members.ask(2, "sum")
    left = [0, 2]
    while left:
        rank, answer = members.answer(*left)
        assert isinstance(answer, dict)
        assert answer["error"] == "ExchangeError"
        assert answer["message"] == f"worker {rank} lost the connection to another worker"
        assert members.end(rank) == 0
        left.remove(rank)
