from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.command_line import exit_code_of
from tandem.services.process import PROCESS_MARK_VARIABLE, Repeated, SerialExecutor

CODE = """
import os
from pathlib import Path
from tandem.services.process import yield_to_others
yield_to_others()
group = Path("/proc/self/autogroup")
print(os.nice(0), group.read_text().split()[-1] if group.exists() else "none")
"""


def test_a_process_that_yields_lowers_the_priority_of_its_own_session_alone() -> None:
    group = Path("/proc/self/autogroup")
    before = (os.nice(0), group.read_text() if group.exists() else "none")
    done = subprocess.run(
        [sys.executable, "-c", CODE], start_new_session=True, capture_output=True, text=True, timeout=30, check=True
    )
    niceness, of_group = done.stdout.split()
    assert int(niceness) == before[0] + 5
    assert of_group in ("5", "none")
    assert (os.nice(0), group.read_text() if group.exists() else "none") == before


def test_services_collect_garbage_less_often_once_they_have_started() -> None:
    code = "import gc; from tandem.services.process import starting\nwith starting():\n    assert not gc.isenabled()\n"
    code += "print(gc.isenabled(), gc.get_threshold()[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "True 10000\n"


BUG = """
import sys
from tandem.services.command_line import run_service_command
from tandem.services.process import Repeated, stop_event

def beat():
    raise ZeroDivisionError("the heartbeat's bug")

def serve():
    stop = stop_event()
    with Repeated("heartbeat", 0.01, beat):
        stop.wait(30)
        print("stops in order", stop.is_set())

run_service_command(serve)
"""


def test_a_bug_in_a_repeated_call_ends_the_service_with_its_error() -> None:
    done = subprocess.run([sys.executable, "-c", BUG], capture_output=True, text=True, timeout=60)
    assert done.stdout == "stops in order True\n"
    assert done.returncode == 1 and "ZeroDivisionError: the heartbeat's bug" in done.stderr


TWO_BUGS = """
import signal, time
from tandem.services.command_line import run_service_command
from tandem.services.process import Repeated, stop_event

def serve():
    stop = stop_event()

    def beat():
        raise ZeroDivisionError("the heartbeat's bug")

    def watch():
        while signal.getsignal(signal.SIGINT) != signal.SIG_DFL:
            time.sleep(0.01)
        raise ValueError("the watchdog's bug")

    with Repeated("heartbeat", 0.01, beat), Repeated("watchdog", 0.01, watch) as second:
        stop.wait(30)
        second._thread.join(30)
        print("stops in order")

run_service_command(serve)
"""


def test_two_bugs_in_repeated_calls_stop_the_service_in_order() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_BUGS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "stops in order\n")
    assert "ValueError: the watchdog's bug" in done.stderr and "ZeroDivisionError: the heartbeat's bug" in done.stderr


def test_a_bug_in_a_repeated_call_does_not_replace_the_error_that_ends_the_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        entered.set()
        leave.wait(10)
        raise ZeroDivisionError

    def serve() -> None:
        with Repeated("late", 0.01, call) as repeated:
            assert entered.wait(10)
            repeated._ended.set()
            leave.set()
            raise ConfigError("the user's error")

    assert exit_code_of(serve) == 2
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_a_call_that_fails_as_its_block_is_left_is_raised_there() -> None:
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        entered.set()
        leave.wait(10)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Repeated("late", 0.01, call) as repeated:
        assert entered.wait(10)
        repeated._ended.set()
        leave.set()


def test_a_serial_executor_makes_calls_in_order_in_one_thread_and_gives_back_their_errors() -> None:
    held, made = threading.Event(), []
    executor = SerialExecutor("serial")

    def call(number: int) -> str:
        assert held.wait(10)
        made.append(number)
        if number == 1:
            raise ZeroDivisionError
        return threading.current_thread().name

    futures = [executor.submit(call, number) for number in range(3)]
    executor.close()
    assert not any(future.done() for future in futures), "the caller goes on"
    assert not futures[0].cancel()
    thread = next(one for one in threading.enumerate() if one.name == "serial")
    held.set()
    assert isinstance(futures[1].exception(10), ZeroDivisionError)
    assert (futures[0].result(10), futures[2].result(10), made) == ("serial", "serial", [0, 1, 2])
    thread.join(10)
    assert not thread.is_alive() and thread.daemon


JOINING = """
import os, signal, threading
from tandem.services.process import stop_event
stop = stop_event()
with threading._shutdown_locks_lock:  # which `Thread.join` holds for a moment
    os.kill(os.getpid(), signal.SIGTERM)
print(stop.wait(30))
"""


def test_a_signal_while_the_main_thread_joins_another_one_stops_the_service() -> None:
    done = subprocess.run([sys.executable, "-c", JOINING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n")


STUCK = """
import os, signal, time
from tandem.services import process
process._SLOW_STOP_SECONDS = 0.1
stop = process.stop_event()

def waits_for_ever():
    time.sleep(600)

os.kill(os.getpid(), signal.SIGTERM)
print(stop.wait(30), flush=True)
waits_for_ever()
"""


def test_a_service_that_does_not_stop_in_time_says_where_it_is() -> None:
    environment = {**os.environ, PROCESS_MARK_VARIABLE: "run:feed"}
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "True\n"
        assert any(" in waits_for_ever" in line for line in child.stderr), "read until the process ends"
        child.kill()
