"""A seccomp filter of system calls for the code in a sandbox, as a program for the kernel's classic BPF.

It lists refused calls, not allowed ones. Namespaces isolate; the filter removes calls that could attack the kernel, and
resources that process limits do not bound (shared memory, anonymous files, further processes). The numbers are from the
kernel's unistd tables. An architecture without a column here has no filter, which `tandem doctor` reports.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from functools import cache

from tandem.reward.sandbox.inside import kernel

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NEWEST = 462  # calls with higher numbers are newer than this list; the filter answers "not implemented"

# Calls that are always refused: name, number on x86_64, number on aarch64 (- if there is none).
_TABLE = """
the network (of it only a pair of connected sockets can be had, which asyncio needs):
socket 41 198, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242

other processes:
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272, pidfd_open 434 434,
pidfd_getfd 438 438, pidfd_send_signal 424 424, process_madvise 440 440, process_mrelease 448 448,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, setpriority 141 140, sched_setscheduler 144 119,
sched_setparam 142 118, sched_setattr 314 274, ioprio_set 251 30

programs (there are none inside):
execve 59 221, execveat 322 281

namespaces, mounts, files by handle:
unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428,
move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442,
name_to_handle_at 303 264, open_by_handle_at 304 265, fanotify_init 300 262

memory that no limit of a process counts:
memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, semget 64 190, msgget 68 186, mq_open 240 180

large or rarely used parts of the kernel:
bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
io_uring_register 427 427, io_setup 206 0, add_key 248 217, request_key 249 218, keyctl 250 219, personality 135 92,
modify_ldt 154 -, lookup_dcookie 212 18, nfsservctl 180 42, uselib 134 -, migrate_pages 256 238, move_pages 279 239,
mbind 237 235, set_mempolicy 238 237, vhangup 153 58

the machine:
kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, delete_module 176 106,
reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60, quotactl_fd 443 443, syslog 103 116,
settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171, sethostname 170 161,
setdomainname 171 162, iopl 172 -, ioperm 173 -
"""
REFUSED = {
    name: tuple(int(number) if number != "-" else None for number in numbers)
    for name, *numbers in re.findall(r"(\w+) (\d+) (\d+|-)(?:,|$)", _TABLE, re.MULTILINE)
}
"""System calls that are always refused: numbers by name, in the order of `_ARCHITECTURES`."""

_CLONE, _CLONE3, _FORK, _VFORK = (56, 220), (435, 435), (57, None), (58, None)
_KILL, _TGKILL, _TKILL = (62, 129), (234, 131), (200, 130)
_SOCKETPAIR, _PRLIMIT = (53, 199), (302, 261)
_ITSELF = 0x7FFFFFF1  # placeholder: no process has this id
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000

# Instructions of classic BPF, and offsets of number, architecture and arguments in `struct seccomp_data`.
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERROR | errno.EPERM
_UNKNOWN = _ERROR | errno.ENOSYS

_Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def available() -> bool:
    """Whether the calls of this architecture are known. `install` shows whether the kernel accepts a filter."""
    return os.uname().machine in _ARCHITECTURES and ctypes.sizeof(ctypes.c_void_p) == 8


def install() -> None:
    """Filters the calling process permanently. Needs no_new_privs. Raises OSError if the kernel has no filters."""
    program = assembled().replace(struct.pack("=I", _ITSELF), struct.pack("=I", os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    described = _Program(len(program) // 8, ctypes.addressof(buffer))
    kernel.prctl(kernel.SET_SECCOMP, 2, ctypes.addressof(described))


@cache
def assembled() -> bytes:
    """Returns the filter's instructions with a placeholder for the process id. Computed once, before forking."""
    return b"".join(struct.pack("=HBBI", *one) for one in _rules(os.uname().machine))


def _rules(machine: str) -> list[_Instruction]:
    architecture, column = _ARCHITECTURES[machine]
    rules: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        *_unless((_EQUAL, architecture), _KILL_PROCESS),  # calls of another word size have other numbers
        (_LOAD, 0, 0, _NUMBER),
        *_when((_ABOVE, _NEWEST), _UNKNOWN),  # includes the calls of x32
        *_when((_EQUAL, _CLONE3[column]), _UNKNOWN),  # its flags cannot be checked; the C library falls back to clone
    ]
    calls = (*REFUSED.values(), _FORK, _VFORK, _TKILL)
    numbers = (pair[column] for pair in calls)
    rules += [rule for number in numbers if number is not None for rule in _when((_EQUAL, number), _REFUSE)]
    rules += _argument(_SOCKETPAIR[column], _unless((_EQUAL, 1), _REFUSE))  # AF_UNIX
    rules += _argument(_PRLIMIT[column], _unless((_EQUAL, 0), _REFUSE))  # only its own
    threads_only = [(_ANY_BIT, 1, 0, _CLONE_THREAD), _end(_REFUSE)]
    rules += _argument(_CLONE[column], [*threads_only, *_when((_ANY_BIT, _CLONE_NAMESPACES), _REFUSE)])
    rules += _argument(_TGKILL[column], _unless((_EQUAL, _ITSELF), _REFUSE))
    rules += _argument(_KILL[column], [(_EQUAL, 2, 0, _ITSELF), (_EQUAL, 1, 0, 0), _end(_REFUSE)])
    return [*rules, _end(_ALLOW)]


def _end(verdict: int) -> _Instruction:
    return (_RETURN, 0, 0, verdict)


def _when(test: tuple[int, int], verdict: int) -> list[_Instruction]:
    return [(test[0], 0, 1, test[1]), _end(verdict)]


def _unless(test: tuple[int, int], verdict: int) -> list[_Instruction]:
    return [(test[0], 1, 0, test[1]), _end(verdict)]


def _argument(number: int, rules: list[_Instruction]) -> list[_Instruction]:
    """Applies rules to the first argument of one call."""
    body: list[_Instruction] = [(_LOAD, 0, 0, _FIRST_ARGUMENT), *rules, _end(_ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
