"""Calls from a test to an answer that runs in another sandbox.

The answer cannot forge a verdict: what it sends becomes plain data or a builtin exception, never code, and the
statements of the test run where it has no access.

Requests and replies are one line of JSON each:
{"get": [object or null, name]}                      reads an attribute, or with null a name of the answer's module
{"call": object, "args": […], "kwargs": {…}}          calls the object
{"function": name, "args": […]}                      calls that function, or that method of a new `Solution()`
{"items": object}                                    lists the object's items
→ {"value": …}, with "args" if the call changed its arguments; or {"error": class, "message": …}
"""

from __future__ import annotations

import builtins
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

from tandem.reward.sandbox.inside.wire import decode, dumps, encode

_MOST_ITEMS = 1_000_000
_MESSAGE_CHARACTERS = 500
_LOOP_ENDS = (StopIteration, StopAsyncIteration)


class Answering:
    """The answer's end: runs requests on the answer's module. `given`: names that the prelude defined in it."""

    def __init__(self, module: ModuleType, given: dict[str, object]) -> None:
        self._module = module
        self._given = given
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def serve(self, line: socket.socket) -> None:
        with line.makefile("rb") as requests:
            for request in requests:
                line.sendall(self._reply(json.loads(request)))

    def _reply(self, request: dict[str, object]) -> bytes:
        try:
            return dumps(self._answer(request))
        except Exception as error:
            return dumps({"error": type(error).__name__, "message": str(error)[:_MESSAGE_CHARACTERS]})

    def _answer(self, request: dict[str, Any]) -> dict[str, object]:
        match request:
            case {"get": [None, name]}:
                return {"value": self._encode(self._own(name))}
            case {"get": [number, name]}:
                return {"value": self._encode(getattr(self._objects[number], name))}
            case {"items": number}:
                return {"value": self._encode(list(itertools.islice(self._objects[number], _MOST_ITEMS)))}
            case {"function": name, "args": sent}:
                return self._call(self._function(name), sent, {})
            case {"call": number, "args": sent, "kwargs": named}:
                return self._call(self._objects[number], sent, named)
        raise ValueError("not a request")

    def _call(self, function: Callable[..., object], sent: list[object], named: dict[str, object]) -> dict[str, object]:
        arguments = self._decode(sent)
        value = function(*arguments, **{name: self._decode(one) for name, one in named.items()})
        reply = {"value": self._encode(value)}
        after = self._encode(arguments)
        return reply if after == sent else {**reply, "args": after}

    def _own(self, name: str) -> object:
        """Returns the value of a name that the answer, not the prelude, defined. Raises KeyError."""
        value = vars(self._module)[name]
        if name in self._given and self._given[name] is value:
            raise KeyError(name)
        return value

    def _function(self, name: str) -> Any:
        solution = getattr(self._module, "Solution", None)
        if solution is not None and hasattr(solution, name):
            return getattr(solution(), name)
        return getattr(self._module, name)

    def _encode(self, value: object) -> object:
        return encode(value, self._keep)

    def _keep(self, value: object) -> dict[str, object]:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)  # kept alive, so that its id stays unique
        return {"object": number, "type": type(value).__name__}

    def _decode(self, value: Any) -> Any:
        return decode(value, lambda tag: self._objects[tag["object"]])


class Calling:
    """The test's end."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._replies = line.makefile("rb")
        self._remotes: dict[int, Remote] = {}

    def get(self, remote: Remote | None, name: str) -> object:
        return self._ask({"get": [None if remote is None else remote.number_, name]})["value"]

    def items(self, remote: Remote) -> list[object]:
        found = self._ask({"items": remote.number_})["value"]
        if not isinstance(found, list):
            raise TypeError("no items came")
        return found

    def call(self, remote: Remote, arguments: tuple[object, ...], named: dict[str, object]) -> object:
        values = {name: encode(value, _refuse) for name, value in named.items()}
        sent = encode(list(arguments), _refuse)
        reply = self._ask({"call": remote.number_, "args": sent, "kwargs": values})
        for mine, theirs in zip(arguments, reply.get("args", ()), strict=False):
            _become(mine, theirs)
        return reply["value"]

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        self._line.sendall(dumps(request))
        reply = self._replies.readline()
        if not reply.endswith(b"\n"):
            raise ConnectionError("the answer's process has ended")
        said = json.loads(reply)
        if "error" in said:
            raise _exception(said["error"])(str(said.get("message", "")))
        return {key: decode(said[key], self._find) for key in ("value", "args") if key in said}

    def _find(self, tag: dict[str, Any]) -> Remote:
        number = int(tag["object"])
        return self._remotes.setdefault(number, Remote(self, number, str(tag["type"])))


class Remote:
    """Proxy of an answer's object in the test. It supports only calls, attribute reads and iteration."""

    __slots__ = ("_calling", "number_", "type_")

    def __init__(self, calling: Calling, number: int, kind: str) -> None:
        self._calling = calling
        self.number_ = number
        self.type_ = kind

    def __call__(self, *arguments: object, **named: object) -> object:
        return self._calling.call(self, arguments, named)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)  # so that `copy` and others find no protocol
        return self._calling.get(self, name)

    def __iter__(self) -> Iterator[object]:
        return iter(self._calling.items(self))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return self is other
        raise TypeError(f"an object of the answer's ({self.type_}) is not data and equals none")

    def __bool__(self) -> bool:
        raise TypeError(f"an object of the answer's ({self.type_}) is neither true nor false here")

    def __hash__(self) -> int:
        return hash(self.number_)

    def __repr__(self) -> str:
        return f"<{self.type_} of the answer's>"


def _refuse(value: object) -> dict[str, object]:
    if isinstance(value, Remote):
        return {"object": value.number_, "type": value.type_}
    raise TypeError(f"{type(value).__name__} is not data and cannot be sent to the answer")


def _exception(name: object) -> type[Exception]:
    """Returns the builtin exception of that name, or RuntimeError. StopIteration could end a loop silently."""
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _LOOP_ENDS):
        with suppress(TypeError):  # UnicodeDecodeError and others need more than a message
            kind("")
            return kind
    return RuntimeError


def _become(mine: object, theirs: object) -> None:
    """Applies to the test's list, dict or set what the answer did to its copy."""
    if isinstance(mine, list) and isinstance(theirs, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set) and isinstance(theirs, type(mine)):
        mine.clear()
        mine.update(theirs)
