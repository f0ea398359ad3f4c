"""Steps that some or all worker processes refuse: who is to blame, and whether the next step can follow."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine_core.executor.test_multiproc import DEADLINE_S, RANKS, running
from tests.engine_core.worker.conftest import BLOCK_SIZE
from tests.support.server import wait_for
from tokenmill_engine.errors import EngineDeadError, EngineError
from tokenmill_engine.executor import worker_pool
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rank", RANKS)
def test_one_rank_fails_alone(rank: int, fault: Callable[[str], Path], tmp_path: Path) -> None:
    fault(f"{rank} 1 raise")
    with running(tmp_path, 2) as workers:
        handles = [workers.submit() for _ in range(3)]
        assert handles[0].result().num_new.tolist() == [1]
        for handle in handles[1:]:
            with pytest.raises(EngineDeadError, match=rf"^worker 3.{rank}: step \d+ failed: ValueError: a fault$"):
                handle.result()


@pytest.mark.parametrize("rank", RANKS)
def test_one_rank_fails_alone_before_steps_of_other_sizes(
    rank: int, fault: Callable[[str], Path], tmp_path: Path
) -> None:
    """A worker that went on with them would end itself or another one: gloo aborts where sizes differ."""
    fault(f"{rank} 1 raise")
    with running(tmp_path, 2) as workers:
        plans = [rehearsal_plan(1, length, 1, BLOCK_SIZE, GREEDY) for length in (64, 64, 3, 40)]
        handles = [workers.submit(plan) for plan in plans]
        assert handles[0].result().num_new.tolist() == [1]
        for handle in handles[1:]:
            with pytest.raises(EngineDeadError, match=rf"^worker 3.{rank}: step \d+ failed: ValueError: a fault$"):
                handle.result()
        assert workers.losses == []


def test_a_worker_that_ends_after_another_has_failed_is_not_to_blame(
    fault: Callable[[str], Path], tmp_path: Path
) -> None:
    fault("1 1 raise")
    with running(tmp_path, 2) as workers:
        handles = [workers.submit() for _ in range(3)]

        def has_failed() -> bool:
            workers.executor._collect()
            return bool(workers.executor._failures)

        wait_for(has_failed, DEADLINE_S, "a failure")
        workers.processes[0].kill()
        assert workers.lost.wait(DEADLINE_S)
        assert handles[0].result().num_new.tolist() == [1]
        for handle in handles[1:]:
            with pytest.raises(EngineDeadError, match=r"^worker 3.1: step \d+ failed: ValueError: a fault$"):
                handle.result()


@pytest.mark.parametrize("who", ["all", "1"])
def test_a_failure_is_settled_also_while_there_is_no_room_for_plans(
    who: str, fault: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that wait for what becomes of it read none."""
    monkeypatch.setattr(worker_pool, "_PLANS_BYTES", 256)
    fault(f"{who} 1 raise")
    with running(tmp_path, 2) as workers:
        handles = [workers.submit() for _ in range(6)]
        assert handles[0].result().num_new.tolist() == [1]
        error, name = (EngineError, "") if who == "all" else (EngineDeadError, "worker 3.1: ")
        with pytest.raises(error, match=rf"^{name}step \d+ failed: ValueError: a fault$"):
            handles[1].result()
        if who == "all":
            assert [handle.result().num_new.tolist() for handle in handles[2:]] == [[1]] * 4


def test_ranks_fail_for_different_reasons(fault: Callable[[str], Path], tmp_path: Path) -> None:
    fault("all 1 differ")
    with running(tmp_path, 2) as workers:
        workers.submit().result()
        with pytest.raises(EngineDeadError, match=r"^worker 3.([01]): step \d+ failed: ValueError: a fault of \1$"):
            workers.submit().result()


def test_all_ranks_fail_alike_at_any_moment(fault: Callable[[str], Path], tmp_path: Path) -> None:
    fault("all 1 raise")
    with running(tmp_path, 2) as workers:
        handles = [workers.submit() for _ in range(3)]
        assert handles[0].result().num_new.tolist() == [1]
        with pytest.raises(EngineError, match=r"^step \d+ failed: ValueError: a fault$"):
            handles[1].result()
        assert handles[2].result().num_new.tolist() == [1]


@pytest.mark.parametrize(("size", "where"), [(1, ""), (2, "worker 3.[01]: ")])
def test_a_lost_device_is_the_end(size: int, where: str, fault: Callable[[str], Path], tmp_path: Path) -> None:
    fault("all 1 lose")
    with running(tmp_path, size) as workers:
        handles = [workers.submit() for _ in range(3)]
        assert handles[0].result().num_new.tolist() == [1]
        for handle in handles[1:]:
            with pytest.raises(EngineDeadError, match=f"^{where}the device is lost$"):
                handle.result()
