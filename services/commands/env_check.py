"""`tandem env check`: does a class keep the contract of environments? Each check has a process of its own, without the
secrets of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.protos.child_environment import child_environment
from tandem.protos.contracts import JsonObject
from tandem.protos.errors import UserError
from tandem.protos.types import task_of
from tandem.rollout.environments.checked_episode import CheckError
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import end_process
from tandem.services.command_line import print_text
from tandem.services.process import dying_with_parent

ACTIONS = ("8", "", "yes", "higher", '{"name": "none", "arguments": {}}', "Ein längerer Satz.\nUnd noch einer.", "12")
"""What the policy says, unless a file has it. A policy may say anything."""

_CHILD = (sys.executable, "-m", "tandem.rollout.environments.conformance")
_START_SECONDS = 60.0  # to import the user's module
_GRACE_SECONDS = 5.0  # after which a process that has ended no call is taken to hang
_MAX_LINE_BYTES = 1 << 30  # it may have several snapshots


def environment_to_check(path: str, arguments: str, step_seconds: float, variables: Sequence[str]) -> EnvironmentConfig:
    """Raises UserError if `path` names no class of a file or module, or `arguments` are no JSON object."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise UserError(f"{path!r:.200} names no class; write module.path:Class or path/to/file.py:Class")
    if place.endswith(".py") and not Path(place).is_file():
        raise UserError(f"{place} is no file (looked in {Path.cwd()})")
    values = _json(arguments, "--arguments") if arguments else {}
    if not isinstance(values, dict):
        raise UserError(f'--arguments: {arguments:.80} is no JSON object; write e.g. {{"size": 3}}')
    return EnvironmentConfig(path=path, arguments=values, step_seconds=step_seconds, variables=tuple(variables))


def read_actions(file: Path | None) -> Sequence[str]:
    """The texts of a JSON list. Raises UserError if the file has none."""
    if file is None:
        return ACTIONS
    try:
        actions = _json(file.read_text(encoding="utf-8"), f"--actions {file}")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--actions {file}: {getattr(error, 'strerror', None) or error}; name a readable file"
        ) from None
    if not isinstance(actions, list) or not actions or not all(isinstance(action, str) for action in actions):
        raise UserError(f'--actions {file}: it has no list of texts; write e.g. ["8", "4"]')
    return actions


def read_task(given: str) -> JsonObject:
    """A JSON object with columns of a task, or the first usable row of a dataset file. Raises UserError."""
    task: JsonObject = {"data_source": "", "prompt": [], "ability": "", "ground_truth": "", "extra_info": {}}
    if not given:
        return task
    if not given.lstrip().startswith("{"):
        return _first_row(given)
    values = _json(given, "--task")
    assert isinstance(values, dict), "JSON that starts with a brace is an object"
    if unknown := sorted(set(values) - set(task)):
        raise UserError(f"--task has the key {unknown[0]!r:.80}; a task has {', '.join(task)}")
    return {**task, **values}


def _first_row(file: str) -> JsonObject:
    from tandem.services.data.dataset import Dataset, Row

    row = next((row for row in Dataset(file) if isinstance(row, Row)), None)
    if row is None:
        raise UserError(f"--task {file}: it has no usable row; see `tandem data check {file}`")
    return task_of(row)


def _json(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{place}: it is no JSON: {error}") from None


class ConformanceChecks:
    """The checks of one class."""

    def __init__(self, config: EnvironmentConfig, task: JsonObject, actions: Sequence[str]) -> None:
        """Raises UserError if one of `config.variables` is not set."""
        self._request = {
            "path": config.path,
            "arguments": config.arguments,
            "step_seconds": config.step_seconds,
            "task": task,
            "actions": actions,
        }
        self._step_seconds = config.step_seconds
        self._variables = child_environment(config.variables, "--variable")
        self._any_failed = False

    async def make_all(self) -> bool:
        """Prints a line for each check. Without import and contract the others would say nothing new. Returns whether
        all have passed.
        """
        if await self._show("import", "import") is None:
            return False
        contract = await self._show("contract", "contract")
        if contract is None:
            return False
        deterministic = await self._show("determinism", "determinism", "determinism") is not None
        await self._show("seeds", "seeds")
        for name in ("concurrency", "cancellation"):
            await self._show(name, name, deterministic=deterministic)
        await self._show("close", "close")
        await self._show("leaks", "leaks")
        if contract["has_snapshot"]:
            await self._show("snapshot", "snapshot", "restore")
        else:
            print_text("snapshot: not checked: the class has no snapshot and restore")
        return not self._any_failed

    async def _show(self, name: str, *checks: str, **given: object) -> JsonObject | None:
        """Prints a line about checks, each of which gets what the one before has found. None: one has failed."""
        found: JsonObject = given
        try:
            for number, check in enumerate(checks, 1):
                found = await self.found(check, found, number)
        except CheckError as error:
            print_text(f"{name}: failed: {error}")
            self._any_failed = True
            return None
        print_text(f"{name}: passed" + (f" ({found['note']})" if "note" in found else ""))
        return found

    async def found(self, check: str, given: JsonObject, hash_seed: int) -> JsonObject:
        """What a check finds, made in a process. Raises CheckError if it fails."""
        # What the class has started may write there while it is killed.
        with TemporaryDirectory(prefix="tandem-env-check-", ignore_cleanup_errors=True) as folder:
            process = await asyncio.create_subprocess_exec(
                *dying_with_parent(_CHILD),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**self._variables, "TMPDIR": folder, "PYTHONHASHSEED": str(hash_seed)},
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
            try:
                return await self._answer(process, {**self._request, "check": check, "given": given})
            finally:
                await end_process(process)

    async def _answer(self, process: asyncio.subprocess.Process, request: JsonObject) -> JsonObject:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        process.stdin.write(json.dumps(request).encode() + b"\n")
        place = "the import"
        while True:
            seconds = _START_SECONDS if place == "the import" else self._step_seconds + _GRACE_SECONDS
            try:
                async with asyncio.timeout(seconds):
                    line = await process.stdout.readline()
            except TimeoutError:
                fault = f"{place} has not ended after {seconds:.3g} s"
                raise CheckError(f"{fault}; it blocks its process, or goes on after its cancellation") from None
            if not line:
                raise CheckError(f"{place} ended its process{await _how_ended(process)}")
            message = json.loads(line)
            if "failed" in message:
                raise CheckError(message["failed"])
            if "found" in message:
                found: JsonObject = message["found"]
                return found
            place = message["at"]


async def _how_ended(process: asyncio.subprocess.Process) -> str:
    with contextlib.suppress(TimeoutError):  # others may hold its pipes
        async with asyncio.timeout(_GRACE_SECONDS):
            await process.wait()
    code = process.returncode
    if code is None:
        return ""
    return f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
