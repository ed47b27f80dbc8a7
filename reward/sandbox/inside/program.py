"""The program of a run: a script, an answer, or a test that calls one. It runs in a separate process with limits."""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

from tandem.reward.sandbox.inside.calls import Answering, Calling

LINE = 3
"""Descriptor of the socket between a test and the answer that it calls."""
PASSED, FAILED, RAISED, UNUSABLE = 0, 1, 2, 3
"""Exit codes of a test: it reached its end, an assertion failed, it raised, it does not compile. The answer runs in
another process, so it cannot choose the exit code.
"""

# As in LiveCodeBench's evaluation. Python frames do not use the C stack, so this depth is safe.
_RECURSION_LIMIT = 50_000
_INTEGER_DIGITS = 50_000


def main(kind: str, texts: list[str]) -> NoReturn:
    """Runs the program and ends the process. `texts`: the prelude, the code or test, and a test's entry point."""
    _reset_interpreter()
    status = RAISED if kind == "test" else 1
    try:
        if kind == "test":
            status = _check(*texts)
        elif kind == "answer":
            _answer(*texts)
            status = 0
        else:
            _execute("__main__", *texts)
            status = 0
    except SystemExit as end:
        status = _exit_status(end)
    except BaseException as error:
        _print_traceback(error)
    _leave(status)


def _print_traceback(error: BaseException) -> None:
    """From the program's own frames on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _reset_interpreter() -> None:
    """Makes the interpreter look newly started with a file: new streams, and no modules of Tandem."""
    sys.stdin = sys.__stdin__ = _stream(0, "r", "surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", "surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", "backslashreplace", buffering=1)  # type: ignore[misc]
    sys.argv = ["answer.py"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tandem"]:
        del sys.modules[name]
    sys.setrecursionlimit(_RECURSION_LIMIT)
    sys.set_int_max_str_digits(_INTEGER_DIGITS)


def _stream(descriptor: int, mode: str, errors: str, buffering: int = -1) -> Any:
    return open(descriptor, mode, encoding="utf-8", errors=errors, buffering=buffering, closefd=False)


def _execute(name: str, prelude: str, code: str) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    exec(compile(prelude, "<prelude>", "exec"), vars(module))
    vars(module)["__file__"] = "answer.py"
    exec(compile(code, "answer.py", "exec"), vars(module))
    return module


def _answer(prelude: str, code: str) -> None:
    given = vars(_execute("given", prelude, ""))
    Answering(_execute("answer", prelude, code), given).serve(socket.socket(fileno=LINE))


def _check(prelude: str, test: str, entry_point: str) -> int:
    """Returns PASSED only if the test and every check that it defines run to the end."""
    try:
        code = compile(test, "test.py", "exec")
    except (SyntaxError, ValueError, RecursionError) as error:
        print(f"it does not compile: {error}", file=sys.stderr)
        return UNUSABLE
    module = _execute("__main__", prelude, "")
    calling = Calling(socket.socket(fileno=LINE))
    try:
        found = _names_for(code, entry_point, calling)
        vars(module).update(found)
        solution = sys.modules["solution"] = ModuleType("solution")  # some test collections import from this name
        vars(solution).update(found)
        exec(code, vars(module))
        return _run_checks(module, set(_names_in(code)), entry_point)
    except AssertionError:
        traceback.print_exc()
        return FAILED


def _run_checks(module: ModuleType, own: set[str], entry_point: str) -> int:
    """Runs the checks that the test defines: `check(candidate)` (HumanEval), `test_…` functions (pytest), unittest."""
    checks = [one for name, one in vars(module).items() if name in own and isinstance(one, FunctionType)]
    for check in checks:
        takes = check.__code__.co_argcount - len(check.__defaults__ or ())
        if check.__name__ == "check":
            if not entry_point:
                print("it defines check(candidate), but there is no entry_point", file=sys.stderr)
                return UNUSABLE
            check(vars(module)[entry_point])
        elif check.__name__.startswith("test"):
            if takes:
                print(f"{check.__name__} takes arguments", file=sys.stderr)
                return UNUSABLE
            check()
    if "unittest" not in sys.modules:
        return PASSED
    unittest = sys.modules["unittest"]
    cases = unittest.defaultTestLoader.loadTestsFromModule(module)
    return PASSED if unittest.TextTestRunner(stream=sys.stderr).run(cases).wasSuccessful() else FAILED


def _names_for(code: CodeType, entry_point: str, calling: Calling) -> dict[str, object]:
    """Resolves the names that the test neither imports nor defines.

    Names of built-ins and standard modules keep their meaning, so that no answer can replace `abs` in a test. Other
    names are looked up in the answer, then in the prelude. If the test uses no other name of the answer, as in
    `assert sum(10, 15) == 6`, the name of a module or built-in may be the answer's.
    """
    named = _names_in(code)
    found: dict[str, object] = {}
    if entry_point:
        found[entry_point] = found["candidate"] = calling.get(None, entry_point)
    modules = named & sys.stdlib_module_names
    built_in = {name for name in named if hasattr(builtins, name)}
    answers = partial(calling.get, None)
    found.update(_resolved(answers, named - built_in - modules - set(found)))
    for names in (modules, built_in):
        found.update({} if found else _resolved(answers, names))
    return {**_resolved(__import__, modules), **found}


def _resolved(find: Callable[[str], object], names: set[str]) -> dict[str, object]:
    """The names that `find` knows: the test may define the others, or have an attribute named like a module."""
    found = {}
    for name in sorted(names):
        with suppress(KeyError, ImportError):
            found[name] = find(name)
    return found


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def _exit_status(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _leave(status: int) -> NoReturn:
    """Ends the process like an interpreter, but for the destruction of objects: waits for threads, runs exit functions,
    flushes streams and open files.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        stdout = getattr(sys, "stdout", None)
        if stdout is not None and not getattr(stdout, "closed", False):
            stdout.flush()
        _flush_what_is_open()
    except BaseException:
        traceback.print_exc()
        status = status or 1
    os._exit(status)


def _flush_what_is_open() -> None:
    """Flushes files that were never closed (`open(1, "w")`) and ignores errors, as an interpreter does."""
    for one in gc.get_objects():
        if issubclass(type(one), io.IOBase):  # isinstance would call the object's `__class__`
            with suppress(Exception):
                one.flush()
