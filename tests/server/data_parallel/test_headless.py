"""How a headless launcher ends before its engine cores serve."""

import signal

import pytest

from tests.support.launched import launched
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
