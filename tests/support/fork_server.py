"""Processes that are forked from one that has imported what they need, because imports take seconds."""

from __future__ import annotations

import multiprocessing.process
import threading
from collections.abc import Callable
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerProcess
from unittest.mock import patch

_CONTEXT = get_context("forkserver")
_STARTING = threading.Lock()


class ForkServer:
    """Starts processes from a server of its own, which imports `modules` once, before the first of them.

    All contexts of multiprocessing share one server with one list of modules: with several users, the last list is that
    of all, and the processes of the others import everything themselves.
    """

    def __init__(self, *modules: str) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(list(modules))

    def start(self, target: Callable[..., None], *arguments: object) -> ForkServerProcess:
        """Starts a process that calls `target`, a function of a module."""
        process = _CONTEXT.Process(target=target, args=arguments)
        with _STARTING, patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process):
            process.start()
            # start() polls all children of this set, of other threads as well. An exit code can be read only once: a
            # thread that joins its process while another one starts a process could get 255.
            multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
        return process
