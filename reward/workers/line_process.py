"""A child process that answers lines of JSON over a socket, watched by the thread that started it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

_OUTPUT_TAIL_BYTES = 2000
_DEATH_SECONDS = 5.0  # between the end of its line and that of the process itself
_END_SECONDS = 10.0


class HungError(Exception):
    """No line within its time. The process is still there."""


class DiedError(Exception):
    """The process closed its end of the line."""


class LineProcess:
    """Runs `main(descriptor, parent_pid)` of a module of ours in a fresh interpreter. What it prints goes to stderr.

    The kernel ends the process with the thread that started it (if `main` asks for that): the thread must outlive it.
    `kill` may be called from any thread, everything else from the one.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        # -P: a file of the working folder named like a module of ours must not replace it
        code = f"import sys; from {module} import main; main(*map(int, sys.argv[1:]))"
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env={**os.environ, **environment},
                start_new_session=True,  # killed with whatever it starts; Ctrl-C is the service's to handle
            )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._output_tail = b""
        self._received = b""
        self._unsent = b""
        self._selector = selectors.DefaultSelector()
        for source in (self._channel, self._output):
            os.set_blocking(source.fileno(), False)
            self._selector.register(source, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def say(self, message: Mapping[str, Any]) -> None:
        """Queues a line; it is sent while `hear` waits."""
        self._unsent += json.dumps(message).encode() + b"\n"

    def hear(self, seconds: float) -> Iterator[dict[str, Any]]:
        """The lines that arrive first, at least one.

        Raises:
            HungError, DiedError: see there.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
            self._selector.modify(self._channel, events)
            for key, event in self._selector.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is self._output:
                    self._forward_output()
                elif event & selectors.EVENT_READ:
                    self._receive()
                else:
                    self._send()
            if time.monotonic() > deadline and b"\n" not in self._received:
                raise HungError
        *complete, self._received = self._received.split(b"\n")
        return map(json.loads, complete)

    def exit_reason(self) -> str:
        """Ends the process, and says how it died and what it wrote last."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_DEATH_SECONDS)
        code = self._process.poll()
        self.kill()
        while self._output in [key.fileobj for key, _ in self._selector.select(0)]:
            self._forward_output()
        if code is None:
            how = "closed its line"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        last_words = self._output_tail.decode(errors="replace").strip().rpartition("\n")[2]
        return how + (f"; it last wrote: {last_words[:200]}" if last_words else "")

    def kill(self) -> None:
        """Ends the process and its children at once; may be called again."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=_END_SECONDS)

    def close(self) -> None:
        """Ends it and frees what it left behind."""
        self.kill()
        self._selector.close()
        self._channel.close()
        self._output.close()

    def _receive(self) -> None:
        try:
            data = self._channel.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise DiedError
        self._received += data

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[self._channel.send(self._unsent) :]
        except (BrokenPipeError, ConnectionResetError):
            self._unsent = b""  # the read that follows tells

    def _forward_output(self) -> None:
        data = self._output.read(1 << 16)
        if data:
            self._output_tail = (self._output_tail + data)[-_OUTPUT_TAIL_BYTES:]
            sys.stderr.write(data.decode(errors="replace"))
        elif data == b"":
            self._selector.unregister(self._output)
