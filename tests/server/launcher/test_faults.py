"""Engine cores and API servers that die or hang, and what the launcher makes of it."""

import os
import re
import signal
import time

import pytest

from tests.support.launched import Launched, launched

pytestmark = pytest.mark.slow

STOPPED_S = 2
WATCHFUL = {"INTERVAL_S": "0.2", "STOPPED_S": str(STOPPED_S), "_MIN_STALL_TIMEOUT_S": "1"}
"""Children are looked at more often and given up sooner than in earnest."""


def kill_engine(run: Launched, engine: int, incarnation: int = 0) -> None:
    os.kill(run.pid(rf"engine {engine}\.{incarnation}"), signal.SIGKILL)


def test_a_dead_engine_core_is_restarted_and_api_servers_hear_of_both() -> None:
    with launched("-dp", "2", "-asc", "2") as run:
        run.wait_for("is ready at")
        kill_engine(run, 1)
        run.wait_for(r"engine core 1 was killed \(SIGKILL\).* \(restarts: True\)", count=2)
        run.wait_for(r"api \d\.0 hears EngineBack", count=2)
        assert "engine core 1 serves again" in run.log
        os.kill(run.pid(r"api 1\.0"), signal.SIGKILL)
        run.wait_for(r"engine [01]\.\d hears that client 1\.0 is gone", count=2)
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)


def test_without_restarts_a_dead_one_stays_away_and_the_last_one_ends_the_server() -> None:
    with launched("-dp", "2", "--max-engine-restarts", "0", environment={"_ERROR_DELIVERY_S": "3"}) as run:
        run.wait_for("is ready at")
        kill_engine(run, 1)
        run.wait_for(r"engine core 1 was killed .* \(restarts: False\)")
        assert run.process.poll() is None
        kill_engine(run, 0)
        run.wait(1)
        assert len(re.findall("hears EngineLost", run.children_log)) == 2
        assert run.log.splitlines()[-1].startswith("error: engine core 0 was killed (SIGKILL)")


def test_an_engine_core_that_keeps_dying_stays_away() -> None:
    """The first restart is at once, the second a second later; after that the other one goes on alone."""
    with launched("-dp", "2", "--max-engine-restarts", "2") as run:
        run.wait_for("is ready at")
        for incarnation in range(3):
            kill_engine(run, 1, incarnation)
        run.wait_for(r"engine core 1 was killed .*, it is not started again")
        run.wait_for("hears EngineBack", count=2)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)
        assert len(re.findall("hears EngineBack", run.children_log)) == 2


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("ready,refuse", "not enough of everything; use --less"),
        ("ready,crash", "engine core 1 exited with status 3 while it was starting"),
    ],
)
def test_a_restart_that_fails_is_no_failed_start(engine: str, reason: str) -> None:
    with launched("-dp", "2", "--max-engine-restarts", "1", engine=engine) as run:
        run.wait_for("is ready at")
        kill_engine(run, 1)
        run.wait_for(re.escape(f"{reason}; its requests are lost, it is not started again"))
        run.wait_for(re.escape(f"{reason} (restarts: False)"))
        assert run.process.poll() is None
        kill_engine(run, 0)
        run.wait(1)
        assert run.log.splitlines()[-1] == "error: " + reason.replace("engine core 1", "engine core 0")


def test_a_single_engine_core_may_be_restarted_too() -> None:
    with launched("--max-engine-restarts", "1") as run:
        run.wait_for("is ready at")
        kill_engine(run, 0)
        run.wait_for("hears EngineBack")
        kill_engine(run, 0, 1)
        run.wait(1)
        assert run.log.splitlines()[-1].startswith("error: engine core 0 was killed (SIGKILL)")


def test_an_engine_core_that_dies_while_others_still_start() -> None:
    """Nobody was told of it yet, so nobody hears of its death."""
    with launched("-dp", "2", engine="late:1") as run:
        kill_engine(run, 0)
        run.wait_for(r"engine 0\.1 pid")
        run.wait_for("is ready at")
        assert "hears EngineLost" not in run.children_log
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)


def test_an_api_server_that_starts_anew_learns_who_is_lost() -> None:
    with launched("-dp", "2", "--max-engine-restarts", "0") as run:
        run.wait_for("is ready at")
        kill_engine(run, 0)
        run.wait_for("hears EngineLost")
        os.kill(run.pid(r"api 0\.0"), signal.SIGKILL)
        run.wait_for(r"api 0\.1 hears EnginesReady: 1 there, 1 lost")
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)


@pytest.mark.parametrize("engine", ["ready,late", "ready,crash"])
def test_a_drain_while_an_engine_core_is_missing(engine: str) -> None:
    with launched("-dp", "2", engine=engine) as run:
        run.wait_for("is ready at")
        kill_engine(run, 0)
        run.wait_for("starting it again")
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)
        assert run.log.splitlines()[-1].endswith("all requests are finished; stopped")


def test_the_last_engine_core_dies_during_a_drain() -> None:
    """The other one, which was to be restarted, does not come any more."""
    with launched("-dp", "2", engine="ready,late", api="stubborn") as run:
        run.wait_for("is ready at")
        kill_engine(run, 0)
        run.wait_for("starting it again")
        run.process.send_signal(signal.SIGTERM)
        run.wait_for("hears Drain")
        kill_engine(run, 1)
        run.wait(1)
        assert run.log.splitlines()[-1].startswith("error: engine core 1 was killed (SIGKILL)")


def test_stopped_children_are_replaced() -> None:
    with launched("-dp", "2", "-asc", "2", environment=WATCHFUL) as run:
        run.wait_for("is ready at")
        for name in (r"engine 0\.0", r"api 1\.0"):
            os.kill(run.pid(name), signal.SIGSTOP)
        run.wait_for(rf"engine core 0 was stopped \(SIGSTOP\) for {STOPPED_S} s and was killed; .* starting it again")
        run.wait_for(rf"API server 1 was stopped \(SIGSTOP\) for {STOPPED_S} s and was killed; .* starting another")
        run.wait_for(r"engine 0\.1 pid")
        run.wait_for(r"api 1\.1 hears EnginesReady")
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)


def test_the_pause_of_the_whole_server_is_nobodys_fault() -> None:
    with launched("-dp", "2", environment=WATCHFUL) as run:
        run.wait_for("is ready at")
        pids = [run.process.pid, *(run.pid(name) for name in (r"engine 0\.0", r"engine 1\.0", r"api 0\.0"))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S + 1)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(1)
        assert "was killed" not in run.log
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)


def test_a_stalled_engine_core_is_told_of_and_killed_in_the_end() -> None:
    with launched("-dp", "2", "--engine-stall-timeout", "2", engine="stall:1,ready", environment=WATCHFUL) as run:
        run.wait_for("engine core 1 is stalled: it has work but finished no step for 2 s")
        run.wait_for("hears EngineStalled")
        run.wait_for("engine core 1 had work but finished no step for 4 s and was killed; .* starting it again")
        run.wait_for("hears EngineBack")
        assert "engine core 0" not in run.log
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)


def test_a_stalled_engine_core_may_recover() -> None:
    with launched("-dp", "2", "--engine-stall-timeout", "4", engine="hiccup:1", environment=WATCHFUL) as run:
        run.wait_for("hears EngineStalled")
        run.wait_for("hears EngineRecovered")
        assert "engine core 1 gets on again" in run.log
        assert "killed" not in run.log
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)


def test_nothing_is_looked_for_when_that_is_switched_off() -> None:
    with launched("-dp", "2", "--engine-stall-timeout", "0", engine="stall:1", environment=WATCHFUL) as run:
        run.wait_for("is ready at")
        os.kill(run.pid(r"engine 0\.0"), signal.SIGSTOP)
        time.sleep(STOPPED_S + 1)
        assert "killed" not in run.log
        assert "stalled" not in run.log
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)
