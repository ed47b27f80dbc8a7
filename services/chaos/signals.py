"""A signal that ends the program waits until what has begun, such as a mount, is undone."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from types import FrameType
from typing import Self


class DeferredSignals(AbstractContextManager["DeferredSignals"]):
    """Inside, SIGINT, SIGTERM and SIGHUP only set `came`. Then the block raises KeyboardInterrupt at its end, unless it
    ends with another error. A SIGHUP that is ignored, as under `nohup`, stays so.
    """

    def __init__(self) -> None:
        self.came = False
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.came and kind is None:
            raise KeyboardInterrupt

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.came = True
        if number == signal.SIGHUP:  # each line for a closed terminal would raise an error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for descriptor in self._terminals:
                os.dup2(nowhere, descriptor)
            os.close(nowhere)
