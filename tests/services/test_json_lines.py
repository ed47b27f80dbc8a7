"""Whatever a command prints becomes JSON lines; its exit code and the signals it gets stay the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tandem.services.json_lines import as_record
from tests.support.paths import ROOT

NOISE = """
import ctypes, faulthandler, logging, sys, threading, warnings
from tandem.services.logging_setup import configure_logging
configure_logging("feed", run="mine")
logging.getLogger("tandem.feed").info("a record", extra={"group": "0-17"})
print("{not json", flush=True)
warnings.warn("careful")
logging.getLogger("library").error("of another logger")
failing = threading.Thread(target=lambda: 1 / 0)
failing.start(), failing.join()
ctypes.CDLL(None).puts(b"native \\xff"), ctypes.CDLL(None).fflush(None)
faulthandler.enable()
"""


def wrapped(program: str, **popen: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tandem.services.json_lines", sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **popen.pop("environment", {"TANDEM_LOG": "json"})}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **popen)


def test_every_line_is_a_json_object() -> None:
    with wrapped(NOISE + "raise ValueError('wrong')") as process:
        out, _ = process.communicate(timeout=60)
    lines = [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 1
    messages = [line["message"] for line in lines]
    record = next(line for line in lines if line["message"] == "a record")
    assert (record["run"], record["service"], record["group"]) == ("mine", "feed", "0-17"), "passed as it was"
    for text in ("{not json", "UserWarning: careful", "of another logger", "ZeroDivisionError", "native \\xff"):
        assert any(text in message for message in messages), (text, messages)
    assert [line["message"] for line in lines if line["logger"] == "stderr"][-1] == "ValueError: wrong"
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)


def test_what_a_process_writes_while_it_crashes_is_json() -> None:
    with wrapped(NOISE + "import os; os.abort()") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGABRT
    assert any("Fatal Python error: Aborted" in json.loads(line)["message"] for line in out.splitlines())


def test_a_signal_reaches_the_command() -> None:
    program = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""
    with wrapped(program) as process:
        assert process.stdout is not None and json.loads(process.stdout.readline())["message"] == "ready"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7


def test_without_the_setting_the_output_stays_as_it_is() -> None:
    with wrapped("print('plain')", environment={"TANDEM_LOG": "text"}) as process:
        assert process.communicate(timeout=60)[0] == "plain\n"


@pytest.mark.parametrize("text", ["{", "[1]", "7", '{"a": 1} and more', "\x1b[31mred"])
def test_only_an_object_passes(text: str) -> None:
    assert json.loads(as_record(text, "stdout"))["message"] == text
    assert as_record('{"a": 1}', "stdout") == '{"a": 1}'
