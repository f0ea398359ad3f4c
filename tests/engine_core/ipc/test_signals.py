"""Signals from outside are kept from children that are about to exist, and not lost for their parent."""

import os
import signal

import pytest

from tokenmill_engine.ipc.signals import OUTSIDE_SIGNALS, ignore_outside_signals, outside_signals_blocked


@pytest.mark.parametrize("number", sorted(OUTSIDE_SIGNALS))
def test_a_signal_that_comes_while_it_is_blocked_is_handled_afterwards(number: signal.Signals) -> None:
    came: list[int] = []
    before = signal.signal(number, lambda got, _frame: came.append(got))
    try:
        with outside_signals_blocked():
            signal.raise_signal(number)
            assert came == []
        assert came == [number]
    finally:
        signal.signal(number, before)


def test_what_was_blocked_before_stays_blocked() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        with outside_signals_blocked():
            pass
        assert signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_child_ignores_those_that_came_while_they_were_blocked() -> None:
    if (pid := os.fork()) == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, OUTSIDE_SIGNALS)
        for number in OUTSIDE_SIGNALS:
            os.kill(os.getpid(), number)
        ignore_outside_signals()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()) & OUTSIDE_SIGNALS
        os._exit(7 if blocked == set() else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
