"""How a headless launcher ends: before its engine cores serve, and when they have something to finish."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.support.launched import Launched, launched
from tests.support.ports import free_port

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_it_serves_is_no_success(number: signal.Signals) -> None:
    """While it looks for its head, and while its engine core loads; after that it has done what it should."""
    common = ("-dp", "2", "-dpl", "1", "--data-parallel-rpc-port", str(free_port()))
    headless = (*common, "-dpr", "1", "--headless")
    with launched(*headless) as looking:
        looking.wait_for("joining the head at")
        looking.process.send_signal(number)
        looking.wait(128 + number)
        assert looking.log.splitlines()[-1].endswith(f"{number.name}: stopped before the model was loaded")
    with launched(*common) as head:
        with launched(*headless, engine="late") as loading:
            head.wait_for("the launcher of rank 1 at .* has joined")
            # Until it has heard of that itself, it ends without a word.
            loading.wait_for(r"engine \d\.0 hears EngineStart")
            loading.process.send_signal(number)
            loading.wait(128 + number)
        head.wait_for("is gone: it was told to stop")
        with launched(*headless) as serving:
            head.wait_for("is ready at")
            serving.wait_for("ready: rank 1")
            serving.process.send_signal(number)
            serving.wait(0)
        head.process.send_signal(number)
        head.wait(0)


def flags_of_two() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a head with rank 0, and of a launcher with rank 1."""
    common = ("-dp", "2", "-dpl", "1", "--data-parallel-rpc-port", str(free_port()))
    return common, (*common, "-dpr", "1", "--headless")


def test_a_drain_ends_with_its_time_or_a_second_signal_or_the_last_api_server_that_has_requests() -> None:
    common, headless = flags_of_two()
    patient = (*headless, "--shutdown-timeout", "600")
    with launched(*common, api="stubborn") as head:
        with launched(*headless, "--shutdown-timeout", "0.2") as brief:
            head.wait_for("is ready at")
            brief.process.send_signal(signal.SIGTERM)
            head.wait_for("hears EngineDraining")
            brief.wait(0)
            assert "what still ran on rank 1 gets an error" in brief.log.splitlines()[-1]
        head.wait_for("is gone: it was told to stop, and what runs there had no more time")
        with launched(*patient, environment={"_REPEAT_S": "0"}) as hurried:
            hurried.wait_for("ready: rank 1")
            hurried.process.send_signal(signal.SIGTERM)
            head.wait_for("hears EngineDraining", 2)
            hurried.process.send_signal(signal.SIGINT)
            hurried.wait(128 + signal.SIGINT)
        head.wait_for("is gone: it was told to stop at once")
        with launched(*patient, environment={"_REPEAT_S": "600"}) as last:
            last.wait_for("ready: rank 1")
            last.process.send_signal(signal.SIGHUP)
            head.wait_for("hears EngineDraining", 3)
            last.process.send_signal(signal.SIGHUP)
            last.wait_for("so soon after the first it counts as the same")
            os.kill(head.pid(r"api 0\.0"), signal.SIGKILL)
            last.wait(0)
            assert "all requests on rank 1 are finished; stopped" in last.log.splitlines()[-1]
        head.wait_for(r"api 0\.1 hears EnginesReady: 1 there, ")
        assert "requests are lost, a launcher" not in head.log


def killed(head: Launched, launcher: Launched) -> None:
    """The head dies."""
    head.process.kill()
    launcher.wait(1)
    assert "is gone, and its launchers end with it" in launcher.log.splitlines()[-1]


def lost(head: Launched, launcher: Launched) -> None:
    """The last engine core dies."""
    os.kill(launcher.pid(r"engine 1\.0"), signal.SIGKILL)
    launcher.wait(1)
    head.wait_for("its launcher does not start it again; its requests are lost")


def stopped(head: Launched, launcher: Launched) -> None:
    """The head drains as well, and one is as patient as the other."""
    head.process.send_signal(signal.SIGTERM)
    launcher.wait(0)
    head.wait(0)
    assert "the head has stopped; so does this launcher" in launcher.log


@pytest.mark.parametrize("ends", [killed, lost, stopped])
def test_what_ends_a_drain_early(ends: Callable[[Launched, Launched], None]) -> None:
    common, headless = flags_of_two()
    times = {"_DRAIN_GRACE_S": "0.1"}
    with (
        launched(*common, "--shutdown-timeout", "0.5", api="stubborn", environment=times) as head,
        launched(*headless, "--shutdown-timeout", "600") as launcher,
    ):
        head.wait_for("is ready at")
        launcher.process.send_signal(signal.SIGTERM)
        head.wait_for("hears EngineDraining")
        ends(head, launcher)


def test_ranks_stay_for_a_head_that_drains_until_it_ends() -> None:
    """Requests that it has taken may still need them."""
    common, headless = flags_of_two()
    with (
        launched(*common, "--shutdown-timeout", "600", api="patient", environment={"_REPEAT_S": "0"}) as head,
        launched(*headless, "--shutdown-timeout", "600") as launcher,
    ):
        head.wait_for("is ready at")
        head.process.send_signal(signal.SIGTERM)
        head.wait_for("hears Drain")
        launcher.process.send_signal(signal.SIGTERM)
        head.wait_for("the launcher of engine core 1 ends with this server")
        head.process.send_signal(signal.SIGTERM)
        launcher.wait(0)
        head.wait(128 + signal.SIGTERM)
        assert "hears EngineDraining" not in head.children_log


def test_a_head_that_has_served_nothing_keeps_no_launcher_waiting() -> None:
    """It still waits for rank 2."""
    common = ("-dp", "3", "-dpl", "1", "--data-parallel-rpc-port", str(free_port()))
    with (
        launched(*common, api="stubborn") as head,
        launched(*common, "-dpr", "1", "--headless", "--shutdown-timeout", "600") as launcher,
    ):
        launcher.wait_for("ready: rank 1")
        launcher.process.send_signal(signal.SIGTERM)
        launcher.wait(0)
        head.wait_for("is gone: it was told to stop")
        assert "hears EngineDraining" not in head.children_log
        assert head.process.poll() is None
