"""The tool `python`: programs of the policy run in sandboxes, which a process of `reward/sandbox` makes.

Each environments' process has one such process. It ends with it, and is started again for the next episode if it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from tandem.protos.child_environment import child_environment
from tandem.protos.contracts import JsonObject
from tandem.protos.options import Options
from tandem.rollout.environments.config import PYTHON
from tandem.rollout.environments.line_calls import LineCalls
from tandem.rollout.environments.loading import ContractError
from tandem.rollout.environments.tools.forked_call import CrashError, RaisedError
from tandem.rollout.environments.tools.schema_arguments import SchemaArguments
from tandem.rollout.environments.tools.tool import Instance, Tool, ToolResult, shortened

_ENDED = f"{PYTHON}: the process of its sandboxes has ended"
_START_SECONDS = 45.0
_MAX_LINE_BYTES = 16 << 20
_COMMAND = (sys.executable, "-P", "-m", "tandem.reward.sandbox.program_runner")
_SCHEMA: JsonObject = {
    "type": "function",
    "function": {
        "name": PYTHON,
        "description": "Runs a Python program and returns what it prints. Each program starts anew.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program. It prints its results."}},
            "required": ["code"],
            "additionalProperties": False,
        },
    },
}


class PythonConfig(Options):
    """`arguments.python`: limits of each program. They are named as those of the code scorer."""

    packages: tuple[str, ...] = ()
    """Installed packages that programs may import besides the standard library."""
    seconds_per_call: Annotated[float, Field(gt=0.0)] = 10.0
    """Processor time of a program."""
    memory_bytes: Annotated[int, Field(ge=128 << 20)] = 1 << 30
    """Address space of a program."""
    allow_unsandboxed: bool = False
    """Run programs where the machine cannot isolate them."""

    @property
    def start_line(self) -> bytes:
        """What the process of the sandboxes reads first."""
        fields = self.model_dump(exclude={"seconds_per_call"})
        return json.dumps({**fields, "cpu_seconds": self.seconds_per_call}).encode() + b"\n"


class SandboxProcessError(ContractError):
    """The sandboxes do not start, or their process has ended. No program is the cause."""


class _Runner:
    """The running process and the calls that wait for its answers. Belongs to one event loop."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._calls = LineCalls(process)
        self._calls.reading.add_done_callback(lambda _: _kill(process))

    @classmethod
    async def start(cls, config: PythonConfig) -> _Runner:
        """Raises SandboxProcessError."""
        process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
            limit=_MAX_LINE_BYTES,
        )
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            process.stdin.write(config.start_line)
            async with asyncio.timeout(_START_SECONDS):
                _check_start(await process.stdout.readline())
        except BaseException as error:
            _kill(process)
            if isinstance(error, TimeoutError | ConnectionError):
                raise SandboxProcessError(f"{PYTHON}: its process did not start; see this log") from None
            raise
        return cls(process)

    @property
    def has_ended(self) -> bool:
        return self._calls.reading.done()

    async def run(self, code: str, seconds: float) -> JsonObject:
        """How the program ended. Raises TimeoutError, or SandboxProcessError if the process ends."""
        try:
            return await self._calls.call(seconds, code=code, seconds=seconds)
        except ConnectionError:
            raise SandboxProcessError(_ENDED) from None


class PythonTool(Tool):
    """Runs each program in a sandbox of its own, so calls of a turn run at the same time."""

    def __init__(self, config: PythonConfig) -> None:
        super().__init__(_SCHEMA, SchemaArguments(_SCHEMA, PYTHON), parallel=True, effect="pure")
        self._config = config
        self._starting: asyncio.Task[_Runner] | None = None

    async def create(self, task: JsonObject) -> Instance:
        await self._runner()
        return Instance("", {})

    async def execute(
        self, instance: Instance, arguments: Mapping[str, object], *, seconds: float, max_chars: int
    ) -> ToolResult:
        """Raises SandboxProcessError if the sandbox does not start or dies, which is no fault of the call."""
        runner = await self._runner()
        ended = await runner.run(str(arguments["code"]), seconds)
        if "error" in ended:
            raise SandboxProcessError(f"{PYTHON}: {ended['error']}")
        text = "\n".join(part for key in ("stdout", "stderr") if (part := ended[key].rstrip("\n")))
        match ended["failure"]:
            case "":
                return ToolResult(shortened(text or "[the program printed nothing]", max_chars))
            case "time":
                limits = f"{self._config.seconds_per_call:g} s of processor time or {ended['wall_seconds']:.3g} s"
                raise TimeoutError(f"the program had not ended after {limits}{_after(text)}")
            case "output":
                raise RaisedError(f"the program printed more than 1 MiB and was stopped{_after(text)}")
        if (code := ended["exit_code"]) < 0:
            raise CrashError(f"the program was ended by signal {-code}{_after(text)}")
        raise RaisedError(f"the program ended with exit code {code}{_after(text)}")

    async def _runner(self) -> _Runner:
        """The running process, or a new one. Raises SandboxProcessError if it does not start."""
        starting = self._starting
        failed = starting is not None and starting.done() and (starting.cancelled() or starting.exception() is not None)
        if starting is None or failed or (starting.done() and starting.result().has_ended):
            starting = self._starting = asyncio.create_task(_Runner.start(self._config))
        return await asyncio.shield(starting)  # others may wait for it


def load_python_tool(config: PythonConfig) -> Tool:
    """Starts the process once to see whether there are sandboxes. Raises ContractError if there are none."""
    try:
        tried = subprocess.run(
            _COMMAND,
            input=config.start_line,
            stdout=subprocess.PIPE,
            env=child_environment(),
            timeout=_START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SandboxProcessError(f"{PYTHON}: no sandbox started within {_START_SECONDS:.0f} s") from None
    _check_start(tried.stdout)
    return PythonTool(config)


def _check_start(line: bytes) -> None:
    if not line:
        raise SandboxProcessError(f"{PYTHON}: its process ended at its start; see this log")
    if told := json.loads(line).get("error"):
        raise SandboxProcessError(f"{PYTHON}: {told}")


def _after(text: str) -> str:
    return f"; it printed:\n{text}" if text else ""


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
