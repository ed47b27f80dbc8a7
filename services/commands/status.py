"""`tandem status`, `tandem ledger` and `tandem scale`: what a run does, whether its counts add up, its replicas."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from tandem.protos import common_pb2, common_pb2_grpc, control_pb2, control_pb2_grpc
from tandem.protos.errors import EnvironmentLackError, TandemError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.redis_server import start_redis
from tandem.services.command_line import cell, print_line
from tandem.services.config import load_resolved
from tandem.services.rpc.certificates import channel_credentials
from tandem.services.rpc.client import connect, translated
from tandem.services.run.folder import (
    CONFIG_FILE,
    SUMMARY_FILE,
    RunAddress,
    RunLock,
    external_redis_url,
    redis_required,
    resume_command,
    running,
)

RPC_SECONDS = 2.0
SCALE_SECONDS = 30.0  # the supervisor reads the size of the model
_MOST_REPLICAS = 10_000  # fits into the message; a machine holds far fewer


def show_status(folder: Path, console: Console) -> int:
    """Prints a running run's services and groups, or a stopped run's summary."""
    address = running(folder)
    if address is None:
        _show_stopped(folder, console)
        return 0
    status, counts = ask_supervisor(address)
    head = ("service", "state", "pid", "restarts", "version", "address", "doing")
    table = Table(*head, box=None, header_style="bold", pad_edge=False)
    for service in status.services:
        info = _info(service.address, address)
        version, doing = ("–", "") if info is None else (str(info.policy_version), info.activity)
        place = service.address or "–"
        table.add_row(
            *(cell(service.name), cell(service.state), str(service.pid or "–"), str(service.restarts)),
            *(version, cell(place), cell(doing)),
        )
    print_line(console, f"run {status.run_id} in {folder}: running, supervisor pid {address.pid}\n")
    console.print(table)
    console.print()
    _show_counts(counts, console)
    return 0


def ask_supervisor(address: RunAddress) -> tuple[control_pb2.GetStatusReply, dict[str, int]]:
    """The status and the ledger's counts from the run's supervisor. Raises UnavailableError if it does not answer."""
    with _connect(address.control, address) as channel, translated():
        stub = control_pb2_grpc.ControlServiceStub(channel)
        status = stub.GetStatus(control_pb2.GetStatusRequest(), timeout=RPC_SECONDS)
        ledger = stub.GetLedger(control_pb2.GetLedgerRequest(), timeout=RPC_SECONDS)
    return status, dict(ledger.counts)


def scale_service(folder: Path, wanted: str, console: Console) -> int:
    """Orders `SERVICE=COUNT` replicas from the run's supervisor. Raises UserError if it refuses."""
    service, _, count = wanted.partition("=")
    if not count.isascii() or not count.isdigit():
        raise UserError(f"{wanted!r} is not SERVICE=COUNT; example: tandem scale {folder} rollout=2")
    address = running(folder)
    if address is None:
        raise UserError(f"{folder}: no run is running there; go on with it by `{resume_command(folder)}`")
    with _connect(address.control, address) as channel, translated():
        request = control_pb2.ScaleRequest(service=service, replicas=min(int(count), _MOST_REPLICAS))
        control_pb2_grpc.ControlServiceStub(channel).Scale(request, timeout=SCALE_SECONDS)
    print_line(console, f"{service}: {count} ordered; `tandem status {folder}` shows who joins and leaves")
    return 0


def show_ledger(folder: Path, console: Console, *, as_json: bool) -> int:
    """Prints the count of each state and whether the counts add up. Returns 1 if they do not."""
    with ledger_of(folder) as buffer:
        counts, violations = buffer.counts(), buffer.verify()
    if as_json:
        console.print_json(json.dumps({"counts": counts, "violations": violations}))
    else:
        _show_counts(counts, console)
        told = [f"VIOLATION: {one}" for one in violations] or ["sound: admitted = the sum over all states"]
        print_line(console, "\n".join(told))
    return 1 if violations else 0


@contextmanager
def ledger_of(folder: Path) -> Iterator[Buffer]:
    """Opens the ledger of a run folder. For a stopped run, starts an embedded server on its files.

    Raises EnvironmentLackError if there is no Redis with the run, even while the ledger is read.
    """
    recipe = load_resolved(folder / CONFIG_FILE)
    with ExitStack() as stack, redis_required():
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


def _show_stopped(folder: Path, console: Console) -> None:
    file = folder / SUMMARY_FILE
    if not file.is_file():
        print_line(console, f"{folder}: not running and not finished; go on with it by `{resume_command(folder)}`")
        return
    finished = time.strftime("%F %T", time.localtime(file.stat().st_mtime))
    summary = json.loads(file.read_text(encoding="utf-8"))
    print_line(console, f"{folder}: finished {finished}\n")
    table = Table.grid(padding=(0, 2))
    for name, value in summary.items():
        if not isinstance(value, dict):
            table.add_row(cell(name), f"{value:,.4g}" if isinstance(value, float) else cell(str(value)))
    console.print(table)
    console.print()
    _show_counts(summary.get("groups", {}), console)


def _show_counts(counts: Mapping[str, int], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, count in counts.items():
        table.add_row(cell(name), str(count))
    console.print(table)


def _connect(service: str, address: RunAddress) -> grpc.Channel:
    credentials = channel_credentials(Path(address.certificates), "service") if address.certificates else None
    return connect(service, address.token, credentials)


def _info(service: str, address: RunAddress) -> common_pb2.InfoReply | None:
    if not service:
        return None
    try:
        with _connect(service, address) as channel, translated():
            stub = common_pb2_grpc.InfoServiceStub(channel)
            reply: common_pb2.InfoReply = stub.Info(common_pb2.InfoRequest(), timeout=RPC_SECONDS)
            return reply
    except TandemError:
        return None
