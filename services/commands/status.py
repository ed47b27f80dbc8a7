"""`tandem status` and `tandem ledger`: the state of a run, and whether the counts in its ledger add up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem.protos import common_pb2, common_pb2_grpc, control_pb2, control_pb2_grpc
from tandem.protos.errors import EnvironmentLackError, TandemError, UnavailableError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.redis_server import start_redis
from tandem.services.config import load_resolved
from tandem.services.rpc.client import connect, translated
from tandem.services.run.folder import CONFIG_FILE, SUMMARY_FILE, RunAddress, RunLock, external_redis_url, running

RPC_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One service of a running run; `info` is None if it does not answer."""

    name: str
    state: str
    pid: int
    restarts: int
    address: str
    info: common_pb2.InfoReply | None = None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run, from its supervisor and its services."""

    run_id: str
    services: tuple[ServiceStatus, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    violations: tuple[str, ...] = ()


def show_status(folder: Path, console: Console) -> int:
    """Prints a running run's services and groups, or a stopped run's summary. Returns 0, or 1 if the supervisor does
    not answer.
    """
    address = running(folder)
    if address is None:
        _show_stopped(folder, console)
        return 0
    if not address.control:
        console.print(f"{folder}: starting (supervisor pid {address.pid})")
        return 0
    status = ask_supervisor(address)
    table = Table(
        "service",
        "state",
        "pid",
        "restarts",
        "version",
        "address",
        "doing",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    for service in status.services:
        info = service.info
        table.add_row(
            service.name,
            service.state,
            str(service.pid or "–"),
            str(service.restarts),
            "–" if info is None else str(info.policy_version),
            service.address or "–",
            "" if info is None else info.activity,
        )
    console.print(f"run {status.run_id} in {folder}: running, supervisor pid {address.pid}\n", highlight=False)
    console.print(table)
    console.print()
    _show_counts(status.counts, console)
    return 0


def ask_supervisor(address: RunAddress) -> RunStatus:
    """Gets status and ledger from the run's supervisor, and Info from each of its services.

    Raises:
        UnavailableError: the supervisor does not answer.
    """
    with connect(address.control) as channel, translated():
        stub = control_pb2_grpc.ControlServiceStub(channel)
        status = stub.GetStatus(control_pb2.GetStatusRequest(), timeout=RPC_SECONDS)
        ledger = stub.GetLedger(control_pb2.GetLedgerRequest(), timeout=RPC_SECONDS)
    services = tuple(
        ServiceStatus(one.name, one.state, one.pid, one.restarts, one.address, _info(one.address))
        for one in status.services
    )
    return RunStatus(status.run_id, services, dict(ledger.counts), tuple(ledger.violations))


def show_ledger(folder: Path, console: Console, *, as_json: bool) -> int:
    """Prints the count of each state and whether the counts add up. Returns 1 if they do not."""
    with ledger_of(folder) as buffer:
        counts, violations = buffer.counts(), buffer.verify()
    if as_json:
        console.print_json(json.dumps({"counts": counts, "violations": violations}))
        return 1 if violations else 0
    _show_counts(counts, console)
    for violation in violations:
        console.print(f"VIOLATION: {violation}", markup=False, highlight=False)
    if not violations:
        console.print("sound: admitted = the sum over all states", highlight=False)
    return 1 if violations else 0


@contextmanager
def ledger_of(folder: Path) -> Iterator[Buffer]:
    """Opens the ledger of a run folder. For a stopped run, starts an embedded server on its files.

    Raises:
        EnvironmentLackError: the run left no Redis files, or its Redis does not hold the run or cannot be reached, even
            while the ledger is read.
    """
    recipe = load_resolved(folder / CONFIG_FILE)
    with ExitStack() as stack, _reached():
        address = running(folder)
        url = address.redis_url if address is not None else external_redis_url(recipe)
        if not url:
            if not (folder / "redis").is_dir():
                raise EnvironmentLackError(
                    f"{folder} holds no Redis data; its run never started, or used another Redis: set TANDEM_REDIS_URL"
                )
            stack.enter_context(RunLock(folder))  # so that no supervisor starts on the same files
            server = start_redis(folder)
            stack.callback(server.stop)
            url = server.url
        buffer = Buffer(url, recipe.run.run_id, connect_timeout_seconds=RPC_SECONDS)
        stack.callback(buffer.close)
        if not buffer.exists():
            raise EnvironmentLackError(
                f"Redis at {buffer.place} knows no run {buffer.run_id}; set TANDEM_REDIS_URL to the one it used"
            )
        yield buffer


@contextmanager
def _reached() -> Iterator[None]:
    """Converts an unreachable Redis to a user error, because no one restarts it and the ledger itself may be fine."""
    try:
        yield
    except UnavailableError as error:
        raise EnvironmentLackError(str(error)) from None


def _show_stopped(folder: Path, console: Console) -> None:
    file = folder / SUMMARY_FILE
    if not file.is_file():
        console.print(
            f"{folder}: not running and not finished; go on with it by `tandem run {folder / CONFIG_FILE} --resume`",
            soft_wrap=True,
            highlight=False,
        )
        return
    finished = time.strftime("%F %T", time.localtime(file.stat().st_mtime))
    summary = json.loads(file.read_text(encoding="utf-8"))
    console.print(f"{folder}: finished {finished}\n", highlight=False)
    table = Table.grid(padding=(0, 2))
    for name, value in summary.items():
        if not isinstance(value, dict):
            table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    console.print()
    _show_counts(summary.get("groups", {}), console)


def _show_counts(counts: Mapping[str, int], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, count in counts.items():
        table.add_row(name, str(count))
    console.print(table)


def _info(address: str) -> common_pb2.InfoReply | None:
    if not address:
        return None
    try:
        with connect(address) as channel, translated():
            reply: common_pb2.InfoReply = common_pb2_grpc.InfoServiceStub(channel).Info(
                common_pb2.InfoRequest(), timeout=RPC_SECONDS
            )
            return reply
    except TandemError:
        return None
