"""Calls of a process that reads a line of JSON for each and answers each with one, in any order."""

from __future__ import annotations

import asyncio
import itertools
import json
from asyncio.subprocess import Process

from tandem.protos.contracts import JsonObject


class LineCalls:
    """The calls that wait for answers of a started process, on its standard input and output. Belongs to one event
    loop. A line has the number of its call as `call`.
    """

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        self._stdin, self._stdout = process.stdin, process.stdout
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[JsonObject]] = {}
        self.reading = asyncio.create_task(self._read())
        """It is done once the process answers no more. To cancel it ends all calls."""

    async def call(self, seconds: float | None, /, **message: object) -> JsonObject:
        """The answer. Raises ConnectionError if the process has ended or ends, TimeoutError after `seconds`, if any."""
        if self.reading.done():
            raise ConnectionResetError
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._stdin.write(json.dumps({"call": number, **message}).encode() + b"\n")
            async with asyncio.timeout(seconds):
                return await answer
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        try:
            while line := await self._stdout.readline():
                reply = json.loads(line)
                waiting = self._waiting.get(reply["call"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionResetError())
