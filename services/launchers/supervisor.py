"""`tandem run`: starts all services, here or in a Ray cluster, restarts those that die, and stops all at the end."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Literal

from rich.console import Console

from tandem.protos.child_environment import HUB_TOKENS
from tandem.protos.errors import TandemError, UnavailableError
from tandem.rollout.engine import remove_leftovers
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.starvation import REDIS_AWAY_SECONDS
from tandem.services.command_line import print_line
from tandem.services.config import Recipe
from tandem.services.control.controller import Controller, Lease
from tandem.services.control.server import control_server
from tandem.services.data.overlap import compares_tasks, trained_prompts
from tandem.services.launchers.children import ChildSpec
from tandem.services.launchers.local import LocalLauncher
from tandem.services.launchers.machines import THIS_MACHINE, Machines
from tandem.services.launchers.process_group import (
    FAILED,
    FINISHED,
    INCOMPLETE,
    INTERRUPTED,
    SERVICE_ORDER,
    ProcessGroup,
)
from tandem.services.metrics.ports import PORT_VARIABLE
from tandem.services.process import in_thread
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run.best_version import reason_to_stop
from tandem.services.run.dtypes import dtype_hint
from tandem.services.run.endpoint import with_own_host
from tandem.services.run.events import note_event
from tandem.services.run.folder import (
    CONFIG_FILE,
    HF_FOLDER,
    SUMMARY_FILE,
    RunAddress,
    RunLock,
    external_redis_url,
    resume_command,
    step_taken,
)
from tandem.services.run.inputs import record_inputs
from tandem.services.run.json_files import EVALUATIONS_FILE, JsonLines
from tandem.services.run.ledger import check_redis_room, create_ledger, forget_run
from tandem.services.run.model_check import ModelFacts
from tandem.services.run.placement import starts_after
from tandem.services.run.preflight import check_recipe
from tandem.services.run.progress import Progress, RunWatch, drop_reasons
from tandem.services.run.redis_child import RedisChild
from tandem.services.run.resume import with_automatic_values

LauncherName = Literal["local", "ray"]


def run_recipe(
    recipe: Recipe,
    resume: bool,
    *,
    console: Console,
    lock: RunLock | None = None,
    launcher_name: LauncherName = "local",
) -> int:
    """Runs a recipe in its run folder until it ends. `lock` is given if the caller has locked the folder already.

    Returns 0 if all batches were trained, 1 after a failure, 2 if a service rejected the user's input, 3 if the run
    ended with fewer batches although epochs were not limited, 130 after Ctrl-C, SIGTERM or a call of Stop. Raises
    UserError for bad input that is found before any process is started.
    """
    recipe = with_own_host(with_automatic_values(recipe, resume=resume), external_redis_url(recipe))
    facts = check_recipe(recipe, resume=resume, on_this_machine=False)
    report = partial(print_line, console)
    with ExitStack() as stack:
        machines = stack.enter_context(_machines(launcher_name, report))
        recipe = machines.fitted(recipe, facts)
        _advise(recipe, facts, report, begins_here=launcher_name == "local" and not resume)
        holding: AbstractContextManager[RunLock] = RunLock(recipe.folder) if lock is None else nullcontext(lock)
        held = stack.enter_context(holding)
        stack.callback(remove_leftovers)  # of killed samplers
        processes = ProcessGroup(report=partial(_report, recipe, console), make_child=machines.make_child)
        stack.enter_context(processes.signals())
        redis_url = external_redis_url(recipe) or _start_redis(recipe, processes, stack)
        machines.check_shared(recipe, redis_url)
        interrupted = threading.Event()
        buffer = Buffer(redis_url, recipe.run.run_id, stop=interrupted)
        stack.callback(buffer.close)
        check_redis_room(buffer, recipe)
        lease = stack.enter_context(Lease(buffer, f"{socket.gethostname()}:{recipe.folder.resolve()}"))
        create_ledger(buffer, recipe, resume)
        lease.renew()  # what an earlier run without a batch has left in Redis is gone, and the lease with it
        record_inputs(recipe, buffer)
        watch = stack.enter_context(RunWatch(recipe, buffer))
        processes.on_poll.append(lambda: _report_warnings(watch, processes))
        processes.on_poll.append(OutageReport(recipe, buffer.place, processes).check)
        processes.on_poll.append(OverlapReport(recipe, processes.report).tell)
        _show(watch, processes)
        specs_of = partial(child_specs, redis_url=redis_url, machines=machines)
        launcher = LocalLauncher(launcher_name, recipe, buffer, processes, specs_of, machines)
        controller = stack.enter_context(Controller(recipe, buffer, launcher, lease))
        processes.add(launcher.first_children(_first_replicas(recipe, controller)))
        if controller.orders.samplers("paused"):
            report(f"samplers are paused since the run was stopped; go on with: tandem resume {recipe.folder}")
        control = stack.enter_context(control_server(controller, threading.Event(), report))
        token = run_token(buffer.secret(), Role.operate)
        certificates = os.path.abspath(recipe.run.certificates) if recipe.run.certificates else ""
        held.publish(RunAddress(os.getpid(), redis_url, control, token, certificates))
        with Progress(watch, processes.states, console):
            outcome = processes.run()
            if outcome == INTERRUPTED:
                interrupted.set()  # nothing waits for Redis any more
            else:
                watch.ask_redis()
                _report_warnings(watch, processes)
        return report_outcome(recipe, buffer, outcome, watch.snapshot.step, processes.report)


def _advise(recipe: Recipe, facts: ModelFacts | None, report: Callable[[str], None], *, begins_here: bool) -> None:
    """A run that has begun keeps its dtype, and the machines of a cluster may differ from this one."""
    if begins_here and (hint := dtype_hint(recipe, facts)):
        report(hint)


def _show(watch: RunWatch, processes: ProcessGroup) -> None:
    """Lets the process group see what the run's figures say of its children."""
    processes.progress, processes.redis_silence = watch.progress_of, lambda: watch.redis_silence
    processes.last_heartbeat = lambda name: watch.last_heartbeats.get(name, 0.0)
    processes.silence = lambda name: watch.silences.get(name, 0.0)


def _first_replicas(recipe: Recipe, controller: Controller) -> dict[str, int]:
    """With how many replicas each scaled service starts."""
    environments = {"environments": recipe.environment.num_replicas} if recipe.environment.service else {}
    wanted = {"rollout": recipe.rollout.num_replicas, **environments}
    return {name: controller.first_replicas(name, number) for name, number in wanted.items()}


def _start_redis(recipe: Recipe, processes: ProcessGroup, stack: ExitStack) -> str:
    """Starts the run's own Redis, which is restarted when it dies or hangs, and returns its URL."""
    redis = RedisChild(
        recipe.folder,
        report=processes.report,
        progress=lambda: processes.progress("redis"),
        silence=lambda: processes.redis_silence(),
    )
    processes.on_poll.append(redis.restart_if_dead)
    return stack.enter_context(redis).url


class OutageReport:
    """Says when Redis does not answer and when it does again. Ends the run when the services no longer wait for it."""

    def __init__(self, recipe: Recipe, place: str, processes: ProcessGroup) -> None:
        self._longest_seconds = recipe.run.redis_outage_seconds
        self._remedy = f"once it answers, go on with: {resume_command(recipe.folder)}"
        self._place = place
        self._processes = processes
        self._is_away = False

    def check(self) -> None:
        """Raises UnavailableError once Redis has been away for longer than `run.redis_outage_seconds`."""
        was_away, silence = self._is_away, self._processes.redis_silence()
        self._is_away = silence >= REDIS_AWAY_SECONDS
        if silence > self._longest_seconds + REDIS_AWAY_SECONDS:
            raise UnavailableError(f"Redis at {self._place} has not answered for {silence:.0f} s; {self._remedy}")
        if self._is_away and not was_away:
            waits = f"the services wait for it up to {self._longest_seconds:g} s (run.redis_outage_seconds)"
            self._processes.report(f"Redis at {self._place} does not answer; {waits}")
        elif was_away and not self._is_away:
            self._processes.report(f"Redis at {self._place} answers again")


class OverlapReport:
    """Says once how many prompts, or tasks of an environment, of evaluation sets are in the training data, too. Counts
    them while the run starts.
    """

    def __init__(self, recipe: Recipe, report: Callable[[str], None]) -> None:
        self._counting = in_thread("overlap", trained_prompts, recipe) if recipe.eval_sets else None
        self._counted = "tasks" if compares_tasks(recipe) else "prompts"
        self._report = report

    def tell(self) -> None:
        """Reports the counts when they are known. A file that is gone meanwhile does not end the run."""
        if self._counting is None or not self._counting.done():
            return
        counting, self._counting = self._counting, None
        try:
            shared = counting.result()
        except TandemError as error:
            self._report(f"the evaluation sets could not be compared with the training data: {error}")
            return
        for name, (number, total) in shared.items():
            if number:
                counted = f"{number} of {total} {self._counted}"
                self._report(f"evaluation set {name}: {counted} are in the training data, too")


def _report(recipe: Recipe, console: Console, line: str) -> None:
    print_line(console, line)
    note_event(recipe.folder, line)


def _report_warnings(watch: RunWatch, processes: ProcessGroup) -> None:
    for warning in watch.take_warnings():
        processes.report(warning)


@contextmanager
def _machines(launcher_name: LauncherName, report: Callable[[str], None]) -> Iterator[Machines]:
    if launcher_name == "ray":
        from tandem.services.launchers.ray_session import ray_session

        with ray_session(report) as cluster:
            yield cluster
    else:
        yield THIS_MACHINE


def child_specs(recipe: Recipe, redis_url: str, machines: Machines = THIS_MACHINE) -> list[ChildSpec]:
    """The services of a run: feed, rollout replicas, environment services if it has some, reward, trainer. Each reads
    the resolved configuration.
    """
    config, judges_keys = str(recipe.folder / CONFIG_FILE), recipe.reward.key_variables() - HUB_TOKENS
    arguments = {service: [service, config] for service in ("feed", "trainer")}
    arguments["reward"] = ["reward", config, "--replica", "0"]
    for replica in range(recipe.environment.num_services):
        arguments[f"environments-{replica}"] = ["environments", config, "--replica", str(replica)]
    for replica in range(recipe.rollout.num_replicas):
        arguments[f"rollout-{replica}"] = ["rollout", config, "--replica", str(replica)]
    for machine in range(1, machines.num_trainers):
        arguments[f"trainer-{machine}"] = ["trainer", config]
    order = sorted(arguments, key=lambda name: -SERVICE_ORDER.index(name.partition("-")[0]))
    return [
        ChildSpec(
            name=name,
            command=(sys.executable, "-m", "tandem.services.cli", "serve", *arguments[name]),
            log_file=recipe.folder / "logs" / f"{name}.log",
            environment={**machines.place(recipe, name), "TANDEM_REDIS_URL": redis_url, PORT_VARIABLE: ""},
            withheld=frozenset() if name == "reward" else judges_keys.difference(_kept(recipe, name)),
            start_after=starts_after(recipe, name),
        )
        for name in order  # the slowest to start comes first
    ]


def _kept(recipe: Recipe, name: str) -> tuple[str, ...]:
    """The variables that a service gets although judges need them, too."""
    return recipe.environment.variables if name.startswith(recipe.environment.run_by) else ()


def report_outcome(recipe: Recipe, buffer: Buffer, outcome: int, step: int, report: Callable[[str], None]) -> int:
    """Reports the end of a run after `step` batches. Returns its exit code. Removes a run that trained no batch."""
    folder = recipe.folder
    if outcome == FINISHED:
        outcome = _verify(buffer, report)
        if outcome == FINISHED and step < recipe.run.total_batches:
            stopped = reason_to_stop(JsonLines(folder / EVALUATIONS_FILE).read(), recipe.eval)
            report(early_end(recipe, step, buffer.counts(), stopped))
            outcome = FINISHED if recipe.data.max_epochs or stopped else INCOMPLETE
        report(f"summary: {folder / SUMMARY_FILE} · trained model: {folder / HF_FOLDER}")
    elif step_taken(folder):
        report(f"{step} of {recipe.run.total_batches} batches are trained; go on with: {resume_command(folder)}")
    else:
        forget_run(recipe, buffer)
        report(f"no batch was trained; {folder} can be used for a new run")
    return outcome


def early_end(recipe: Recipe, step: int, counts: Mapping[str, int], stopped: str = "") -> str:
    """Says why a finished run trained fewer batches than `run.total_batches`, and what happened to its groups.
    `stopped`: why its evaluations ended it, if they did.
    """
    epochs, admitted, dropped = recipe.data.max_epochs, counts["admitted"], counts["dropped"]
    why = "no further group could be scored"
    if epochs:
        why = f"the training data ended after {epochs} epoch{'s' if epochs > 1 else ''} (data.max_epochs={epochs})"
    why = stopped or why
    # A feed that is not done goes on admitting until it learns that the run has ended.
    trained = step * recipe.run.groups_per_batch if stopped else admitted - dropped
    groups = f"Of {admitted} groups, {trained} were trained and {dropped} dropped"
    reasons = f" ({drop_reasons(counts)})" if dropped else ""
    return f"trained {step} of {recipe.run.total_batches} batches: {why}. {groups}{reasons}"


def _verify(buffer: Buffer, report: Callable[[str], None]) -> int:
    """FAILED if the counts in a finished run's ledger do not add up, else FINISHED."""
    try:
        violations = buffer.verify()
    except TandemError as error:
        report(f"the ledger of the finished run could not be checked: {error}")
        return FAILED
    for violation in violations:
        report(f"ledger: {violation}")
    return FAILED if violations else FINISHED
