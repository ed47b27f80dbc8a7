"""`tandem status`: what a run does or did. And what its ledger is opened with."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from tandem.protos import control_pb2
from tandem.protos.errors import DeadlineError, EnvironmentLackError, UnavailableError
from tandem.services.buffer.buffer import COUNTERS, Buffer
from tandem.services.buffer.redis_server import start_redis
from tandem.services.buffer.types import STATES
from tandem.services.command_line import cell, plain, print_line
from tandem.services.commands.find_controller import ControllerPlace, controller_of
from tandem.services.config import load_resolved
from tandem.services.run.folder import (
    CONFIG_FILE,
    SUMMARY_FILE,
    RunLock,
    external_redis_url,
    redis_required,
    resume_command,
    running,
)

RPC_SECONDS = 5.0
_HANG_SECONDS = 60.0


def show_status(folder: Path, console: Console, *, watch: bool) -> int:
    """Prints a running run's services and groups, with `watch` until it ends; or a stopped run's summary."""
    place = controller_of(folder)
    if place is not None and watch:
        watch_running(place, console)
        if controller_of(folder) is None:
            _show_stopped(folder, console)
    elif place is not None:
        show_running(place, console)
    else:
        _show_stopped(folder, console)
    return 0


def show_running(place: ControllerPlace, console: Console) -> None:
    """Prints what the controller knows. Raises UnavailableError if it does not answer."""
    console.print(_status_view(ask_controller(place)), crop=False)


def watch_running(place: ControllerPlace, console: Console) -> None:
    """Shows what the controller knows, anew with each change, until the run or the controller ends: on a terminal in
    place, elsewhere one after the other. A controller that has answered once may hang for `_HANG_SECONDS`.

    Raises DeadlineError or UnavailableError if the controller does not answer.
    """
    show_each(_views(place), console)


def show_each(views: Iterable[RenderableType], console: Console) -> None:
    """Shows each view as it comes: on a terminal in place of the one before, elsewhere below it."""
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        for view in views:
            if live is None:
                console.print(view, crop=False)
            else:
                live.update(view, refresh=True)


def _views(place: ControllerPlace) -> Iterator[Group]:
    last: control_pb2.StatusReply | None = None
    answered_at = time.monotonic()
    while last is None or not last.ended:
        called_at = time.monotonic()
        try:
            with place.stub() as stub:  # each call is answered at once, and then another one follows
                for last in stub.Watch(control_pb2.WatchRequest(), timeout=RPC_SECONDS):
                    answered_at = time.monotonic()
                    yield _status_view(last)
                    if last.ended:
                        break
        except DeadlineError:
            silence = time.monotonic() - answered_at
            if last is None or silence > _HANG_SECONDS:
                raise DeadlineError(
                    f"the controller at {place.address} has not answered for {silence:.0f} s; is its process "
                    "stopped, or its machine overloaded?"
                ) from None
            if answered_at < called_at:
                waits = f"the controller at {place.address} has not answered for {silence:.0f} s; waits for it"
                yield Group(_status_view(last), plain(waits))
        except UnavailableError:
            if last is None:
                raise
            return


def _status_view(status: control_pb2.StatusReply) -> Group:
    head = ("service", "state", "pid", "restarts", "version", "address", "doing")
    table = Table(*head, box=None, header_style="bold", pad_edge=False)
    for one in status.services:
        state = f"{one.state}, paused" if one.paused else one.state
        version = "–" if one.policy_version < 0 else str(one.policy_version)
        table.add_row(
            *(cell(one.name), cell(state), str(one.pid or "–"), str(one.restarts)),
            *(version, cell(one.address or "–"), cell(one.activity)),
        )
    state = status.ended or "running"
    wanted = ", ".join(f"{service}={number}" for service, number in sorted(status.desired_replicas.items()))
    return Group(
        plain(f"run {status.run_id} in {status.run_dir}: {state}, launcher {status.launcher}\n"),
        table,
        plain(f"\nordered: {wanted}\n"),
        *(plain(f"warning: {warning}\n") for warning in status.warnings),
        *(plain(decision_line(decision)) for decision in status.decisions[-3:]),
        counts_table(status.counts),
    )


def decision_line(decision: control_pb2.StatusReply.Decision) -> str:
    """A decision of the autoscaler in one line."""
    at = time.strftime("%T", time.localtime(decision.time))
    numbers = f"{decision.service} {decision.from_replicas} -> {decision.to_replicas}"
    return f"autoscaler {at}: {numbers}{' (dry run)' if decision.dry_run else ''}: {decision.reason}"


def ask_controller(place: ControllerPlace) -> control_pb2.StatusReply:
    """The status of a running run. Raises UnavailableError if the controller does not answer."""
    with place.stub() as stub:
        reply: control_pb2.StatusReply = stub.Status(control_pb2.StatusRequest(), timeout=RPC_SECONDS)
        return reply


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
    console.print(counts_table(summary.get("groups", {})))
    for group_id, why in summary.get("set_aside", {}).items():
        print_line(console, f"set aside: group {group_id}: {why}")


def counts_table(counts: Mapping[str, int]) -> Table:
    """Always in the same order: a reply to Status has none."""
    order = {name: place for place, name in enumerate((*COUNTERS, *STATES))}
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name in sorted(counts, key=lambda name: (order.get(name, len(order)), name)):
        table.add_row(cell(name), str(counts[name]))
    return table
