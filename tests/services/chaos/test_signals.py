"""What a signal does to `tandem chaos`: nothing until all that has begun is undone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tandem.services.chaos.signals import DeferredSignals
from tests.support.processes import run_python

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """A test that fails must not end pytest, and pytest may run under nohup."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_interrupts_at_the_end_however_often_it_comes(number: signal.Signals) -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), DeferredSignals() as signals:
        assert not signals.came
        for step in range(2):
            os.kill(os.getpid(), number)
            steps.append(step)
        assert signals.came
    assert steps == [0, 1]
    assert [signal.getsignal(one) for one in NUMBERS] == [signal.default_int_handler] * 3


def test_without_a_signal_nothing_is_raised_and_an_error_stays_the_error() -> None:
    with DeferredSignals():
        pass
    with pytest.raises(ZeroDivisionError), DeferredSignals():
        os.kill(os.getpid(), signal.SIGINT)
        _ = 1 / 0


def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with DeferredSignals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
    assert not signals.came


def test_after_a_closed_terminal_lines_for_it_are_no_errors() -> None:
    script = """
import os, pty, signal
from tandem.services.chaos.signals import DeferredSignals
master, terminal = pty.openpty()
os.dup2(terminal, 1)
os.close(terminal)
try:
    with DeferredSignals():
        os.close(master)
        os.kill(os.getpid(), signal.SIGHUP)
        os.write(1, b"a line")
except KeyboardInterrupt:
    os.write(2, b"interrupted")
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stderr) == (0, "interrupted")
