"""The seccomp filter: its instructions in a simulated kernel, and the calls that the real kernel refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
from contextlib import closing

import pytest

from tandem.reward.sandbox import isolation
from tandem.reward.sandbox.inside import seccomp
from tests.support.paths import ROOT
from tests.support.sandbox_runs import LIMITS, Launcher, alive

# ---- simulated kernel ----


def verdict(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """Interprets the filter's BPF instructions."""
    instructions = [struct.unpack_from("=HBBI", program, place) for place in range(0, len(program), 8)]
    data = struct.pack("=IIQQ", number, architecture, 0, argument)
    place, value = 0, 0
    while True:
        code, jump_true, jump_false, operand = instructions[place]
        place += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, operand)
            case 0x15 | 0x25 | 0x45:
                true = {0x15: value == operand, 0x25: value > operand, 0x45: bool(value & operand)}[code]
                place += jump_true if true else jump_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"instruction {code:#x}")


ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
MINE = 4242


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_verdicts_on_every_architecture(machine: str) -> None:
    architecture, column = MACHINES[machine]
    rules = b"".join(struct.pack("=HBBI", *one) for one in seccomp._rules(machine))
    rules = rules.replace(struct.pack("=I", seccomp._ITSELF), struct.pack("=I", MINE))

    def of(pair: tuple[int, int], argument: int = 0) -> int:
        return verdict(rules, architecture, pair[column], argument)

    for name in seccomp.REFUSED:
        number = seccomp.REFUSED[name][column]
        assert number is None or verdict(rules, architecture, number, 7) == REFUSE, name
    read, write, openat, mmap, futex, exit_group = (0, 63), (1, 64), (257, 56), (9, 222), (202, 98), (231, 94)
    assert {of(pair) for pair in (read, write, openat, mmap, futex, exit_group)} == {ALLOW}
    socketpair, prlimit, clone, clone3 = (53, 199), (302, 261), (56, 220), (435, 435)
    kill, tgkill = (62, 129), (234, 131)
    assert of(socketpair, 1) == ALLOW and of(socketpair, 2) == of(socketpair, 40) == REFUSE
    assert of(prlimit, 0) == ALLOW and of(prlimit, 1) == REFUSE
    thread, fork, new_user = 0x003D0F00, 0x01200011, 0x10000000
    assert of(clone, thread) == ALLOW and of(clone, thread | new_user) == REFUSE
    assert of(clone, fork) == of(clone, fork | new_user) == REFUSE
    assert of(clone3) == UNKNOWN and verdict(rules, architecture, 9999) == UNKNOWN
    assert of(kill, MINE) == of(kill, 0) == of(tgkill, MINE) == ALLOW
    assert {of(kill, 1), of(kill, 0xFFFFFFFF), of(tgkill, 1)} == {REFUSE}
    assert verdict(rules, 0x40000003, 20) == KILL, "a call of another word size"
    if machine == "x86_64":
        assert verdict(rules, architecture, 0x40000000) == UNKNOWN
        assert verdict(rules, architecture, 57) == verdict(rules, architecture, 58) == REFUSE


def test_the_page_lists_exactly_the_refused_calls() -> None:
    text = (ROOT / "docs" / "sandbox.md").read_text().partition("## Refused system calls")[2]
    named = set(re.findall(r"`(\w+)`", text.partition("`clone3`")[0]))
    with_conditions = {"socketpair", "prlimit64", "kill", "tgkill", "tkill", "fork", "vfork", "clone"}
    assert named == {*seccomp.REFUSED, *with_conditions}
    assert {"socket", "ptrace", "execve", "unshare", "mount", "memfd_create", "bpf"} <= set(seccomp.REFUSED)


# ---- real kernel ----


def test_every_refused_call_is_refused(launcher: Launcher) -> None:
    if not seccomp.available():
        pytest.skip("no filter of system calls for this machine")
    column = seccomp._ARCHITECTURES[os.uname().machine][1]
    refused = {name: pair[column] for name, pair in seccomp.REFUSED.items() if pair[column] is not None}
    not_implemented = {"a call of x32": 0x40000027, "a call of the future": 9999, "clone3": 435}
    program = f"""
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
found = {{}}
for name, number in { ({**refused, **not_implemented})!r}.items():
    ctypes.set_errno(0)
    found[name] = [libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0), ctypes.get_errno()]
print(json.dumps(found))
"""
    results = json.loads(isolation._said(launcher, program, seccomp=True))
    unknown = {name: results.pop(name) for name in not_implemented}
    assert {name: result for name, result in results.items() if result != [-1, 1]} == {}
    assert set(map(tuple, unknown.values())) == {(-1, 38)}
    assert len(results) >= 75


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls of another word size, as an instruction of x86")
def test_calls_of_another_word_size_kill_the_program(launcher: Launcher) -> None:
    program = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # getpid by int 0x80
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
    with closing(launcher.open(seccomp=True)) as sandbox:
        sandbox.await_ready(60.0)
        outcome = sandbox.run("script", ["", program], LIMITS)
        assert outcome.exit_code == -signal.SIGSYS and not outcome.stdout
        assert alive(sandbox)
