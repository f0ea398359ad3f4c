"""What the launcher does with its children, from the start to the end; faults are in `test_faults`."""

import os
import re
import signal
import socket
import time

import psutil
import pytest

from tests.support.launched import launched
from tests.support.processes import wait_for_end
from tests.support.server import PATIENCE_S

pytestmark = pytest.mark.slow

PATIENT = {"_DRAIN_GRACE_S": str(PATIENCE_S)}
"""With API servers that are about to end."""


def test_ready_line_then_clean_stop() -> None:
    with launched("-dp", "2", "-asc", "3") as run:
        run.wait_for(r"is ready at http://127.0.0.1:\d+ after \d+\.\d s \(load 0.1, serve \d+\.\d\)")
        assert len(re.findall(r"api \d\.0 hears EnginesReady", run.children_log)) == 3
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)
        assert len(re.findall(r"api \d\.0 hears Drain", run.children_log)) == 3
        assert run.log.splitlines()[-1].endswith("all requests are finished; stopped")


@pytest.mark.parametrize(
    ("engine", "api", "last_line"),
    [
        ("refuse", "serve", "error: not enough of everything; use --less"),
        ("crash", "serve", "error: engine core 0 exited with status 3 while it was starting"),
        (
            "kill",
            "serve",
            "error: engine core 0 was killed (SIGKILL) while it was starting; if the kernel did so for want "
            "of memory, lower --kv-cache-memory-bytes",
        ),
        ("ready", "fail", "error: API server 0 exited with status 5 while it was starting"),
    ],
)
def test_failed_starts_end_with_one_readable_line(engine: str, api: str, last_line: str) -> None:
    with launched(engine=engine, api=api) as run:
        run.wait(1)
        assert run.log.splitlines()[-1] == last_line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-model-len", "999999999"), "error: --max-model-len 999999999 is more than the 8192 positions"),
        (("-dp", "256", "--kv-cache-memory-bytes", str(1 << 40)), "error: weights and KV cache need "),
        (("--host", "no.such.host.invalid"), "error: "),
    ],
)
def test_wrong_configurations_are_told_though_engine_cores_run_already(
    arguments: tuple[str, ...], message: str
) -> None:
    """One line, nothing left, and no more processes than cores for a number that may be a slip."""
    with launched(*arguments, engine="crash") as run:
        run.wait(1)
        assert run.log.splitlines()[-1].startswith(message)
        assert "engine core" not in run.log
        assert run.children_log.count("engine process") <= (0 if "-dp" in arguments else 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_download_and_the_engine_cores_that_run_already(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(PATIENCE_S)
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        environment |= dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "600")
        with launched("--model", "nobody/endless", environment=environment) as run:
            connection, _ = hub.accept()
            with connection:  # and never an answer
                run.pid("engine process")
                run.process.send_signal(number)
                run.wait(128 + number)
                assert run.log.splitlines()[-1].endswith(f"{number.name}: stopped before the model was loaded")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_is_ready_is_no_success(number: signal.Signals) -> None:
    """An engine core is loading; API servers listen already."""
    with launched("-dp", "2", engine="late:1") as run:
        run.wait_for(r"engine 0\.0 pid")
        run.process.send_signal(number)
        run.wait(128 + number)
        assert run.log.splitlines()[-1].endswith(f"{number.name}: stopped before the model was loaded")


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "was killed (SIGKILL)"), (40, "was ended by signal 40")]
)
def test_dead_engine_is_told_to_clients_before_everything_ends(number: int, words: str) -> None:
    """Also one that a signal without a name has ended."""
    with launched("-asc", "2", environment={"_ERROR_DELIVERY_S": "3"}) as run:
        run.wait_for("is ready at")
        os.kill(run.pid(r"engine 0\.0"), number)
        run.wait(1)
        assert len(re.findall("hears EngineLost", run.children_log)) == 2
        assert f"engine core 0 {words}" in run.children_log
        assert run.log.splitlines()[-1].startswith(f"error: engine core 0 {words}")


def test_dead_api_server_is_replaced_and_its_requests_are_dropped() -> None:
    with launched("-dp", "2", "-asc", "2") as run:
        run.wait_for("is ready at")
        os.kill(run.pid("api 1.0"), signal.SIGKILL)
        run.wait_for(r"api 1\.1 hears EnginesReady")
        run.wait_for(r"engine \d\.\d hears that client 1\.0 is gone", count=2)
        assert "API server 1 was killed" in run.log
        run.process.send_signal(signal.SIGINT)
        run.wait(0)


def test_api_server_killed_while_starting_is_replaced() -> None:
    with launched("-asc", "2") as run:
        os.kill(run.pid("api 0.0"), signal.SIGKILL)
        run.wait_for(r"api 0\.1 hears EnginesReady")
        run.wait_for("is ready at")
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)


def test_api_servers_that_keep_dying_end_the_server() -> None:
    with launched(api="crash") as run:
        run.wait(1)
        assert "error: API servers ended 5 times in 60 s; the last one exited with status 4" in run.log.splitlines()[-1]


def test_drain_waits_for_open_requests() -> None:
    with launched("--shutdown-timeout", "1", api="busy", environment=PATIENT) as run:
        run.wait_for("is ready at")
        stopped = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)
        assert time.monotonic() - stopped >= 1
        assert run.log.splitlines()[-1].endswith("stopped; requests cut off: 3")


def test_cut_off_requests_are_counted() -> None:
    with launched("-asc", "2", "--shutdown-timeout", "0.1", api="busy", environment=PATIENT) as run:
        run.wait_for("is ready at")
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)
        assert run.log.splitlines()[-1].endswith("stopped; requests cut off: 6")


def test_api_server_that_dies_while_it_drains() -> None:
    with launched(api="stubborn") as run:
        run.wait_for("is ready at")
        run.process.send_signal(signal.SIGTERM)
        run.wait_for("hears Drain")
        os.kill(run.pid(r"api 0\.0"), signal.SIGKILL)
        run.wait(0)
        assert "its requests are lost" in run.log
        assert run.log.splitlines()[-1].endswith("stopped")
        assert "all requests are finished" not in run.log


@pytest.mark.parametrize("api", ["stubborn", "patient"])
def test_second_signal_cuts_off(api: str) -> None:
    """API servers get a moment to tell their clients, whether they use it or not."""
    with launched("--shutdown-timeout", "600", api=api, environment={"_CUT_OFF_S": "3"}) as run:
        run.wait_for("is ready at")
        run.process.send_signal(signal.SIGTERM)
        run.wait_for("hears Drain")
        time.sleep(0.4)  # what comes sooner is the first one again
        run.process.send_signal(signal.SIGTERM)
        run.wait(128 + signal.SIGTERM)
        assert len(re.findall("hears Drain", run.children_log)) == 2


@pytest.mark.parametrize("repeated", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_twice_is_one(repeated: signal.Signals) -> None:
    """`timeout` signals its child, then its whole group."""
    with launched("--shutdown-timeout", "0.5", api="busy", environment=PATIENT | {"_REPEAT_S": "30"}) as run:
        run.wait_for("is ready at")
        run.process.send_signal(signal.SIGTERM)
        run.wait_for("hears Drain")
        run.process.send_signal(repeated)
        run.wait(0)
        assert len(re.findall("hears Drain", run.children_log)) == 1


def test_api_server_that_does_not_drain_is_cut_off() -> None:
    with launched("--shutdown-timeout", "0", api="stubborn", environment={"_DRAIN_GRACE_S": "0.5"}) as run:
        run.wait_for("is ready at")
        run.process.send_signal(signal.SIGTERM)
        run.wait(0)
        assert (
            "stopped; requests cut off: 0, and whatever was open in the API servers that did not answer: 1" in run.log
        )


def test_killed_launcher_leaves_no_process() -> None:
    with launched("-dp", "2", "-asc", "2") as run:
        run.wait_for("is ready at")
        names = (r"engine 0\.0", r"engine 1\.0", r"api 0\.0", r"api 1\.0")
        children = [psutil.Process(run.pid(name)) for name in names]
        run.process.kill()
        run.process.wait()
        for child in children:
            wait_for_end(child)


def test_taken_port() -> None:
    with launched() as first:
        first.wait_for("is ready at")
        match = re.search(r"ready at http://127.0.0.1:(\d+)", first.log)
        assert match is not None
        with launched("--port", match[1]) as second:
            assert second.process.wait(PATIENCE_S) == 1
        first.process.send_signal(signal.SIGTERM)
        first.wait(0)
