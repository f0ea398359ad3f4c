"""Plans of a worker's process on a device that works on while the next plan comes, and on one that does not."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.support.server import wait_for
from tokenmill_engine.errors import EngineDeadError, EngineError, ExchangeError
from tokenmill_engine.ipc.shared_ring import RingReader, RingWriter, create_ring
from tokenmill_engine.outputs import MissingImages, StepPlan, StepResult, TokenMasks
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan
from tokenmill_engine.worker.step_loop import StepLoop
from tokenmill_engine.worker.wire import Answer, StepFailure, decode_answer, encode_masks, encode_plan

DEADLINE_S = 60.0


class Step:
    """Ends when it is told to, or fails then."""

    def __init__(self, step: int, ends: threading.Event, error: Exception | None) -> None:
        self._step, self._ends, self._error = step, ends, error

    def wait(self) -> StepResult:
        assert self._ends.wait(DEADLINE_S)
        if self._error is not None:
            raise self._error
        return StepResult(self._step, np.full((1, 1), self._step, np.int32), np.ones(1, np.int32))


class Device:
    """A worker whose steps end when `ends` of them is set, in any order. Those in `refused` cannot begin, those in
    `broken` fail at their end. It is behind other stages if it `has_inlet`."""

    def __init__(self, *, runs_ahead: bool, has_inlet: bool = False) -> None:
        self.runs_ahead = runs_ahead
        self.received_step: int | None = None
        self.has_inlet = has_inlet
        self.begun: list[int] = []
        self.ends = [threading.Event() for _ in range(8)]
        self.refused: dict[int, Exception] = {}
        self.broken: dict[int, Exception] = {}
        self.attending: list[str] = []
        self.masks: list[tuple[int, TokenMasks | None]] = []
        """That followed a plan, each with its step."""

    def execute(self, plan: StepPlan) -> Step:
        self.begun.append(plan.step)
        if self.has_inlet:
            self.received_step = plan.step
        if plan.step in self.refused:
            raise self.refused[plan.step]
        return Step(plan.step, self.ends[plan.step], self.broken.get(plan.step))

    def launch(self, plan: StepPlan) -> "Launched":
        return Launched(self, plan, self.execute(plan))

    def tell_missing(self, tell: Callable[[MissingImages], None]) -> None:
        self.tell = tell

    def enter_thread(self) -> None:
        self.attending.append(threading.current_thread().name)


class Launched:
    """A step that waits for masks."""

    def __init__(self, device: Device, plan: StepPlan, step: Step) -> None:
        self._device, self._plan, self._step = device, plan, step

    def choose(self, masks: TokenMasks | None) -> Step:
        self._device.masks.append((self._plan.step, masks))
        return self._step


def as_engine_error(error: Exception, step: int) -> EngineError:
    return error if isinstance(error, EngineError) else EngineError(f"step {step} failed: {error}")


class Loop:
    """A step loop in a thread, and the rings to it and from it."""

    def __init__(self, device: Device, reports: bool = True, num_agreed: int = 8) -> None:
        """`num_agreed`: failures of which it is known at once that all have failed alike."""
        plans, answers = create_ring(1, 1 << 16), create_ring(1, 1 << 16)
        self._rings = (plans, answers)
        self._plans = RingWriter(plans.memory, plans.wakes, plans.space)
        self._answers = RingReader(*answers.of_reader(0))
        self.agreed = threading.Semaphore(num_agreed)
        writer = RingWriter(answers.memory, answers.wakes, answers.space)
        loop = StepLoop(device, writer, as_engine_error, self.agreed, reports=reports)
        self._thread = threading.Thread(target=loop.run, args=(RingReader(*plans.of_reader(0)),), daemon=True)
        self._thread.start()

    def submit(self, *steps: int, masks_follow: bool = False) -> None:
        for step in steps:
            plan = rehearsal_plan(1, 3, 1, 16, GREEDY)
            for message in encode_plan(replace(plan, step=step, starts=[], masks_follow=masks_follow)):
                self._plans.send(message)

    def mask(self, masks: TokenMasks | None) -> None:
        self._plans.send(encode_masks(masks))

    def take(self) -> Answer | None:
        """An answer that is there."""
        message = self._answers.take()
        return None if message is None else decode_answer(message)

    def receive(self) -> Answer:
        """The next answer."""
        found: list[Answer] = []

        def arrived() -> bool:
            found.extend(filter(None, [self.take()]))
            return bool(found)

        wait_for(arrived, DEADLINE_S, "an answer")
        return found[0]

    def end(self) -> None:
        self._plans.send(b"")

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def close(self) -> None:
        for ring in self._rings:
            ring.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Loop]]:
    loops: list[Loop] = []

    def make(device: Device, reports: bool = True, num_agreed: int = 8) -> Loop:
        loops.append(Loop(device, reports, num_agreed))
        return loops[-1]

    yield make
    for loop in loops:
        loop.end()
        wait_for(loop.has_ended, DEADLINE_S, "the end of the loop")
        loop.close()


def token_of(answer: Answer) -> int:
    assert isinstance(answer, StepResult)
    return int(answer.token_ids[0, 0])


def test_the_next_steps_begin_while_one_is_under_way(start: Callable[..., Loop]) -> None:
    device = Device(runs_ahead=True)
    loop = start(device)
    loop.submit(0, 1, 2)
    wait_for(lambda: device.begun == [0, 1, 2], DEADLINE_S, "three steps under way")
    assert loop.take() is None
    for end in (2, 1, 0):
        assert loop.take() is None
        device.ends[end].set()
    assert [token_of(loop.receive()) for _ in range(3)] == [0, 1, 2]
    assert device.attending == ["answers"]


def test_where_steps_are_computed_at_once_one_is_answered_before_the_next_begins(start: Callable[..., Loop]) -> None:
    device = Device(runs_ahead=False)
    loop = start(device)
    loop.submit(0, 1)
    device.ends[1].set()
    wait_for(lambda: device.begun == [0], DEADLINE_S, "the first step")
    assert loop.take() is None
    device.ends[0].set()
    assert [token_of(loop.receive()) for _ in range(2)] == [0, 1]
    assert device.begun == [0, 1]
    assert device.attending == []


def test_a_failure_does_not_overtake_the_answer_before_it_and_is_told_before_the_next_step(
    start: Callable[..., Loop],
) -> None:
    device = Device(runs_ahead=True)
    device.refused[1] = ValueError("a fault")
    loop = start(device)
    loop.submit(0, 1, 2)
    wait_for(lambda: device.begun == [0, 1], DEADLINE_S, "the step that is refused")
    assert loop.take() is None
    device.ends[0].set()
    device.ends[2].set()
    assert token_of(loop.receive()) == 0
    failure = loop.receive()
    assert isinstance(failure, StepFailure)
    assert (failure.number, failure.message) == (1, "step 1 failed: a fault")
    assert (failure.is_final, failure.is_after_others) == (False, False)
    assert token_of(loop.receive()) == 2


def test_a_failure_is_in_the_ring_when_the_next_step_begins(start: Callable[..., Loop]) -> None:
    """A rank that goes on after a failure may make wrong what others compute; who reads their result reads it first."""
    device = Device(runs_ahead=True)
    device.refused[0] = ValueError("a fault")
    loop = start(device)
    seen: list[Answer | None] = []
    execute = device.execute

    def look_and_execute(plan: StepPlan) -> Step:
        if plan.step == 1:
            seen.append(loop.take())
        return execute(plan)

    device.execute = look_and_execute  # type: ignore[method-assign]
    device.ends[1].set()
    loop.submit(0, 1)
    wait_for(lambda: device.begun == [0, 1], DEADLINE_S, "the step after the failure")
    assert isinstance(seen[0], StepFailure)
    assert token_of(loop.receive()) == 1


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_after_a_failure_nothing_is_begun_until_all_have_failed_alike(
    runs_ahead: bool, start: Callable[..., Loop]
) -> None:
    """Others may be in the middle of that step, and would take this worker's part of a later one for its part of it."""
    device = Device(runs_ahead=runs_ahead)
    device.refused = {0: ValueError("a fault"), 1: ValueError("another")}
    device.ends[2].set()
    loop = start(device, True, 0)
    waiting = threading.Event()
    acquire = loop.agreed.acquire

    def wait(*arguments: object) -> bool:
        waiting.set()
        return acquire()

    loop.agreed.acquire = wait  # type: ignore[method-assign, assignment]
    loop.submit(0, 1, 2)
    for step in (0, 1):
        assert isinstance(loop.receive(), StepFailure)
        assert waiting.wait(DEADLINE_S)
        waiting.clear()
        assert device.begun == list(range(step + 1))
        loop.agreed.release()
    assert token_of(loop.receive()) == 2


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_lost_connection_is_one_warning(
    runs_ahead: bool, start: Callable[..., Loop], caplog: pytest.LogCaptureFixture
) -> None:
    """However many steps are under way: what is wrong is told elsewhere."""
    caplog.set_level("INFO")
    device = Device(runs_ahead=runs_ahead)
    device.broken = {step: ExchangeError("worker 0.1 lost the connection to another worker") for step in range(3)}
    for end in device.ends:
        end.set()
    loop = start(device)
    loop.submit(0, 1, 2)
    for _ in range(3):
        failure = loop.receive()
        assert isinstance(failure, StepFailure)
        assert failure.is_final
    assert [(record.levelname, record.getMessage(), record.exc_info) for record in caplog.records] == [
        ("WARNING", "step 0 failed: worker 0.1 lost the connection to another worker", None)
    ]


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_step_that_fails_at_its_end(runs_ahead: bool, start: Callable[..., Loop]) -> None:
    device = Device(runs_ahead=runs_ahead)
    device.broken = {0: EngineDeadError("the device is lost"), 1: ValueError("a fault")}
    for end in device.ends:
        end.set()
    loop = start(device)
    loop.submit(0, 1, 2)
    lost, failed = loop.receive(), loop.receive()
    assert isinstance(lost, StepFailure)
    assert (lost.number, lost.message, lost.is_final) == (0, "the device is lost", True)
    assert isinstance(failed, StepFailure)
    assert (failed.number, failed.message, failed.is_final) == (1, "step 1 failed: a fault", False)
    assert token_of(loop.receive()) == 2


@pytest.mark.parametrize("kind", ["refused", "broken"])
def test_a_failure_knows_that_the_stages_before_are_done_with_the_step(kind: str, start: Callable[..., Loop]) -> None:
    """Also when a later step has been received meanwhile."""
    device = Device(runs_ahead=True, has_inlet=True)
    getattr(device, kind)[0] = ValueError("a fault")
    loop = start(device)
    loop.submit(0, 1)
    if kind == "broken":
        wait_for(lambda: device.received_step == 1, DEADLINE_S, "the step after the one that fails")
    for end in device.ends:
        end.set()
    failure = loop.receive()
    assert isinstance(failure, StepFailure)
    assert failure.is_after_others


def test_who_does_not_report_sends_failures_alone(start: Callable[..., Loop]) -> None:
    device = Device(runs_ahead=True)
    device.refused[1] = ValueError("a fault")
    for end in device.ends:
        end.set()
    loop = start(device, False)
    loop.submit(0, 1, 2, 3)
    failure = loop.receive()
    assert isinstance(failure, StepFailure)
    assert failure.number == 1
    wait_for(lambda: device.begun == [0, 1, 2, 3], DEADLINE_S, "the last step")
    assert loop.take() is None


def test_who_does_not_report_tells_of_missing_images_before_the_step_goes_on(start: Callable[..., Loop]) -> None:
    """Whoever reports may be done with the step at any moment after that."""
    device, missing = Device(runs_ahead=True), MissingImages(0, (1,), (7,))
    told: list[Answer | None] = []
    begin = device.execute

    def look(plan: StepPlan) -> Step:
        device.tell(missing)
        told.append(loop.take())
        return begin(plan)

    device.execute = look  # type: ignore[method-assign]
    loop = start(device, False)
    loop.submit(0)
    wait_for(lambda: told and device.begun, DEADLINE_S, "the step")
    assert told == [missing]
    device.ends[0].set()


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_masks_follow_the_plan_that_waits_for_them(runs_ahead: bool, start: Callable[..., Loop]) -> None:
    """The step has begun by then. Nothing behind them is taken for them, also if that step was refused."""
    device = Device(runs_ahead=runs_ahead)
    device.refused[1] = ValueError("a fault")
    for end in device.ends:
        end.set()
    loop = start(device)
    masks = TokenMasks(np.array([0], np.int32), np.array([[5]], np.int32))
    for step, following in ((0, masks), (1, masks), (2, None)):
        loop.submit(step, masks_follow=True)
        wait_for(lambda step=step: device.begun == list(range(step + 1)), DEADLINE_S, "the step")  # type: ignore[misc]
        assert loop.take() is None
        loop.mask(following)
        answer = loop.receive()
        assert isinstance(answer, StepFailure) == (step == 1)
    loop.submit(3)
    assert token_of(loop.receive()) == 3
    (first, received), last = device.masks
    assert received is not None
    assert (first, received.rows.tolist(), received.bits.tolist()) == (0, [0], [[5]])
    assert last == (2, None)


def test_the_end_waits_for_steps_under_way(start: Callable[..., Loop]) -> None:
    device = Device(runs_ahead=True)
    loop = start(device)
    loop.submit(0, 1)
    loop.end()
    wait_for(lambda: device.begun == [0, 1], DEADLINE_S, "the last step")
    device.ends[0].set()
    assert token_of(loop.receive()) == 0
    assert not loop.has_ended()
    device.ends[1].set()
    assert token_of(loop.receive()) == 1
    wait_for(loop.has_ended, DEADLINE_S, "the end of the loop")


def test_a_worker_process_begins_without_torch() -> None:
    """It is imported beside what else a start takes."""
    script = "import sys, tokenmill_engine.worker.process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
