"""Grammars are compiled in a process of their own, within limits, and kept."""

import dataclasses
import fcntl
import os
import queue
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.support.engine_bench import engine_config
from tests.support.grammars import spec
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_engine.config.engine import EngineConfig, SchedulerConfig
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.errors import EngineError, NotBegunError, TokenmillError
from tokenmill_engine.messages import StructuredSpec
from tokenmill_engine.structured_output import backends
from tokenmill_engine.structured_output import compiler as compiler_module
from tokenmill_engine.structured_output import store as store_module
from tokenmill_engine.structured_output.grammar import Grammar, GrammarError
from tokenmill_engine.structured_output.store import GrammarStore

pytestmark = pytest.mark.slow

Compile = Callable[[StructuredSpec], Grammar | TokenmillError]


def smollm_config() -> EngineConfig:
    """Of an engine that has the embedded model's tokens."""
    config = engine_config(64, SchedulerConfig())
    architecture = dataclasses.replace(config.model.architecture, vocab_size=49152)
    tokenizer = str(embedded_model_path())
    model = dataclasses.replace(config.model, architecture=architecture, tokenizer_path=tokenizer, eos_token_ids=(2,))
    return dataclasses.replace(config, model=model)


class Waiting:
    """A store and the end of each compilation."""

    def __init__(self) -> None:
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.store = GrammarStore(smollm_config(), lambda: self.woken.put(None))

    def compile(self, *wanted: StructuredSpec) -> list[Grammar | TokenmillError]:
        for each in wanted:
            self.store.compile(each)
        results = {}
        while set(results) != set(wanted):
            self.woken.get(timeout=PATIENCE_S)
            results.update(self.store.finished())
        return [results[each] for each in wanted]


@pytest.fixture(scope="module")
def waiting() -> Iterator[Waiting]:
    waiting = Waiting()
    yield waiting
    waiting.store.close()


def compiler(waiting: Waiting) -> psutil.Process:
    assert waiting.store._compiler is not None
    return psutil.Process(waiting.store._compiler._child.process.pid)


def num_unread_bytes(waiting: Waiting) -> int:
    """Of what the compiler was told."""
    assert waiting.store._compiler is not None
    answer = fcntl.ioctl(waiting.store._compiler._jobs, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def hostile(depth: int) -> dict[str, object]:
    """Twice the size with each level, for who unfolds it."""
    schema: dict[str, object] = {"type": "string"}
    for level in range(depth):
        schema = {"type": "object", "properties": {f"{name}{level}": schema for name in "ab"}}
    return schema


def endless(mark: str) -> dict[str, object]:
    """Whether any text has all of the patterns would be found out in a minute."""
    return {"allOf": [{"type": "string", "pattern": f".*{mark}{letter}.*"} for letter in "abcdefghijklmnopqrst"]}


def test_the_first_one_is_no_work_of_the_thread_that_asks() -> None:
    """Which is the engine core's loop: others start the process and set up the library."""
    fresh, called = Waiting(), set[str]()
    sys.setprofile(lambda frame, _event, _argument: called.add(frame.f_code.co_filename))
    fresh.store.compile(spec("regex", "first"))
    sys.setprofile(None)
    assert store_module.__file__ in called
    assert not called & {compiler_module.__file__, backends.__file__, subprocess.__file__}
    (grammar,) = fresh.compile(spec("regex", "first"))
    assert not isinstance(grammar, TokenmillError)
    fresh.store.close()


def test_what_is_compiled_is_kept(waiting: Waiting) -> None:
    schema, wrong = spec("json", {"type": "integer"}), spec("regex", "[a")
    grammar, error = waiting.compile(schema, wrong)
    assert waiting.store.find(schema) is grammar
    assert isinstance(error, GrammarError)
    assert "unclosed" in error.message
    assert waiting.store.find(wrong) is None


def test_hostile_ones_end_and_harm_nobody(waiting: Waiting) -> None:
    """One library would take minutes for the first, and the other one does it at once; the second is for nobody."""
    wide = spec("json", {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(400)}})
    deep = spec("json", hostile(12))
    fine = spec("choice", ["yes", "no"])
    results = waiting.compile(wide, deep, fine)
    assert not isinstance(results[0], TokenmillError)
    assert not isinstance(results[2], TokenmillError)
    if isinstance(results[1], TokenmillError):
        assert isinstance(results[1], GrammarError)
    wait_for(lambda: not compiler(waiting).children(), PATIENCE_S, "forked processes to end")
    assert compiler(waiting).is_running()


def test_nobody_waits_for_many_hostile_ones(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came after them is ready before the first of them is refused, and most need not be tried to their limit."""
    monkeypatch.setattr(store_module, "_FIRST_LIMIT_S", 0.25)
    monkeypatch.setattr(store_module, "_LIMIT_S", 0.5)
    many = [spec("json", endless(str(number))) for number in range(10)]
    fine = [spec("choice", ["yes", str(number)]) for number in range(3)]
    results: dict[StructuredSpec, Grammar | TokenmillError] = {}
    for each in (*many, *fine):
        waiting.store.compile(each)
    while set(results) != {*many, *fine}:
        waiting.woken.get(timeout=PATIENCE_S)
        results.update(waiting.store.finished())
    began_to_refuse = next(index for index, each in enumerate(results.values()) if isinstance(each, GrammarError))
    assert set(fine) <= set([*results][:began_to_refuse])
    assert not any(isinstance(results[each], TokenmillError) for each in fine)
    refused, sent_away = (
        [each for each in many if isinstance(results[each], kind)] for kind in (GrammarError, NotBegunError)
    )
    assert len(refused) + len(sent_away) == 10
    assert len(sent_away) >= 4
    error = results[sent_away[0]]
    assert isinstance(error, NotBegunError)
    assert error.retry_after_s == 2


def test_one_that_takes_too_long_is_refused(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LIMIT_S", 0.01)
    monkeypatch.setattr(store_module, "_SHORT_S", 0.01)
    (error,) = waiting.compile(
        spec("json", {"type": "object", "properties": {f"q{i}": {"type": "string"} for i in range(4000)}})
    )
    assert isinstance(error, GrammarError)
    assert "0.01 s" in error.message


def test_what_would_take_longer_with_every_token_is_refused(waiting: Waiting) -> None:
    """The grammar is compiled in no time, but a mask of its twelfth token takes seconds."""
    nested = {"type": "regex", "pattern": "((([a-z]*)*)*)*z"}
    for_xgrammar = {"type": "repeat", "min": 1, "max": 1, "content": nested}
    (error,) = waiting.compile(spec("structural_tag", {"type": "structural_tag", "format": for_xgrammar}))
    assert isinstance(error, GrammarError)
    assert "too ambiguous" in error.message


def test_tags_that_one_library_refuses_are_not_for_the_other_one(waiting: Waiting) -> None:
    """It would pass over what is wrong."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    (error,) = waiting.compile(spec("structural_tag", tag))
    assert isinstance(error, GrammarError)
    assert "uniqueItems" in error.message


def test_what_nobody_waits_for_any_more_is_not_begun(waiting: Waiting) -> None:
    waiting.compile(spec("regex", "e"))
    process = compiler(waiting)
    process.suspend()
    begun = [spec("regex", f"f{index}") for index in range(4)]
    given_up, wanted = spec("regex", "g"), spec("regex", "h")
    for each in (*begun, given_up):
        waiting.store.compile(each)
    waiting.store.give_up(given_up)
    process.resume()
    waiting.compile(*begun, wanted)
    assert waiting.store.find(given_up) is None
    (grammar,) = waiting.compile(given_up)
    assert not isinstance(grammar, TokenmillError), "it may be wanted again"


def test_what_comes_twice_is_kept_once(waiting: Waiting) -> None:
    """It is given up in its turn and, before anybody has seen what came of that, wanted again."""
    wanted = spec("regex", "twice")
    waiting.compile(spec("regex", "once"))
    process = compiler(waiting)
    process.suspend()
    waiting.store.compile(wanted)
    wait_for(lambda: num_unread_bytes(waiting) > 0, PATIENCE_S, "the question to be asked")
    waiting.store.give_up(wanted)
    process.resume()
    waiting.woken.get(timeout=PATIENCE_S)
    wait_for(lambda: not waiting.store._turns._begun, PATIENCE_S, "the turn to end")
    waiting.store.compile(wanted)
    waiting.woken.get(timeout=PATIENCE_S)
    assert [each for each, _ in waiting.store.finished()] == [wanted, wanted]
    assert waiting.store._num_bytes == sum(each.num_bytes for each in waiting.store._cache.values())


def test_without_a_thread_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And compiled once there is one."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fresh = Waiting()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        (error,) = fresh.compile(spec("regex", "a"))
    assert isinstance(error, NotBegunError)
    assert error.retry_after_s == 1
    (grammar,) = fresh.compile(spec("regex", "a"))
    assert not isinstance(grammar, TokenmillError)
    fresh.store.close()


def test_a_compiler_that_dies_is_replaced(waiting: Waiting) -> None:
    waiting.compile(spec("regex", "a"))
    process = compiler(waiting)
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: has_ended(process), PATIENCE_S, "the compiler to end")
    (grammar,) = waiting.compile(spec("regex", "b"))
    assert not isinstance(grammar, TokenmillError)
    assert compiler(waiting).pid != process.pid


def test_one_that_dies_at_work_is_told(waiting: Waiting) -> None:
    waiting.compile(spec("regex", "c"))
    process = compiler(waiting)
    process.suspend()
    waiting.store.compile(spec("regex", "d"))
    wait_for(lambda: num_unread_bytes(waiting) > 0, PATIENCE_S, "the question to be asked")
    process.kill()
    waiting.woken.get(timeout=PATIENCE_S)
    ((_, error),) = waiting.store.finished()
    assert isinstance(error, NotBegunError)
    wait_for(lambda: has_ended(process), PATIENCE_S, "the compiler to end")


def test_the_cache_is_bounded(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = spec("choice", ["a", "b"]), spec("choice", ["c", "d"])
    waiting.compile(first, second)
    monkeypatch.setattr(store_module, "CACHE_BYTES", 1)
    third = spec("choice", ["e", "f"])
    waiting.compile(third)
    assert [waiting.store.find(each) is not None for each in (first, second, third)] == [False, False, True]


def test_nothing_is_set_up_for_a_model_that_names_no_end() -> None:
    """Its outputs cannot be structured. What a thread raises fails the test."""
    config = smollm_config()
    endless = dataclasses.replace(config, model=dataclasses.replace(config.model, eos_token_ids=()))
    backends.begin_setup(endless).join(PATIENCE_S)


def test_what_cannot_be_set_up_is_told_to_who_needs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And to nobody at the start, whatever it is: what a thread raises would fail the test."""

    def fail(*_: object) -> None:
        raise RuntimeError("of the tokenizer")

    monkeypatch.setattr(backends, "read_vocabulary", fail)
    monkeypatch.setattr(backends, "_shared", {})
    with caplog.at_level("DEBUG"):
        backends.begin_setup(smollm_config()).join(PATIENCE_S)
    (record,) = caplog.records
    assert (record.levelname, "of the tokenizer" in caplog.text) == ("DEBUG", True)
    broken = Waiting()
    (error,) = broken.compile(spec("regex", "a"))
    broken.store.close()
    assert isinstance(error, EngineError)
    assert "RuntimeError" in error.message


def test_threads_that_ask_at_once_share_what_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[backends.Backends] = []
    second = threading.Event()

    class Slow(backends.Backends):
        def __init__(self, *where: Any) -> None:
            super().__init__(*where)
            built.append(self)
            if len(built) == 2:
                second.set()
            second.wait(0.1)

    monkeypatch.setattr(backends, "Backends", Slow)
    monkeypatch.setattr(backends, "_shared", {})
    model = smollm_config().model
    with ThreadPoolExecutor(2) as threads:
        found = [each.result() for each in [threads.submit(backends.backends_of, model) for _ in range(2)]]
    assert found[0] is found[1]
    assert len(built) == 1
