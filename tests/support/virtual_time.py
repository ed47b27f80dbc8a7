"""Tests that are coroutines, on an event loop whose clock jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps: its clock jumps to the next timer. Waiting without a timer is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        look = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            assert timeout is not None, "everything waits and nothing will happen"
            self.now += max(0.0, timeout)
            return look(0)

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs the coroutine on a `VirtualLoop`."""

    @wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*arguments, **named))

    return run
