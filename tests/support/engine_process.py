"""A sampler engine in a process of its own, because it forks and the test's process has many threads."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from tandem.rollout.engine import SamplerArguments, find_engine

START_SECONDS = 100.0


def nothing() -> None:
    """Prepares nothing."""


class EngineProcess:
    """Calls a `Sampler`'s methods by name: `submit` returns a future, `call` waits for it. Also a context manager.

    `prepare`, a function of a module, is called in the new process before the engine starts.
    """

    def __init__(self, arguments: SamplerArguments, prepare: Callable[[], None] = nothing) -> None:
        self.group_store = arguments.group_store
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._futures: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self.process = context.Process(target=_serve, args=(theirs, arguments, prepare), daemon=False)
        self.process.start()
        theirs.close()
        ready: Future[Any] = Future()
        self._futures[-1] = ready
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.engine_pid: int = ready.result(START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        number, future = next(self._numbers), Future[Any]()
        self._futures[number] = future
        self._pipe.send((number, method, args, kwargs))
        return future

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.submit(method, *args, **kwargs).result(60.0)

    def cancel(self, future: Future[Any]) -> None:
        """Cancels a submitted call and waits until it has ended."""
        number = next(number for number, running in self._futures.items() if running is future)
        self._pipe.send((number, None, (), {}))
        assert isinstance(future.exception(60.0), asyncio.CancelledError)

    def close(self) -> None:
        try:
            self._pipe.send(None)
            self.process.join(20)
            assert self.process.exitcode == 0
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills the process with kill -9, and its engine follows; does nothing if the process has ended."""
        self.process.kill()
        self.process.join(20)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        try:
            while True:
                number, ok, value = self._pipe.recv()
                future = self._futures.pop(number)
                future.set_result(value) if ok else future.set_exception(value)
        except (EOFError, OSError):
            for future in self._futures.values():
                future.set_exception(RuntimeError("the engine's process ended"))


def _serve(pipe: Connection, arguments: SamplerArguments, prepare: Callable[[], None]) -> None:
    prepare()
    asyncio.run(_answer(pipe, arguments))


async def _answer(pipe: Connection, arguments: SamplerArguments) -> None:
    try:
        engine = await find_engine(arguments.config.engine).start(arguments)
    except Exception as error:
        pipe.send((-1, False, error))
        return
    children = multiprocessing.active_children()
    pipe.send((-1, True, children[0].pid if children else os.getpid()))
    tasks: dict[int, asyncio.Task[None]] = {}

    async def run(number: int, method: str, args: Any, kwargs: Any) -> None:
        try:
            value = getattr(engine, method)
            value = value(*args, **kwargs) if callable(value) else value
            pipe.send((number, True, await value if asyncio.iscoroutine(value) else value))
        except (Exception, asyncio.CancelledError) as error:
            pipe.send((number, False, error))

    while (request := await asyncio.to_thread(pipe.recv)) is not None:
        number, method, args, kwargs = request
        if method is None:
            tasks[number].cancel()
        else:
            tasks[number] = asyncio.ensure_future(run(number, method, args, kwargs))
    engine.close()
