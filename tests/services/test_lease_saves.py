"""What the lease loop saves before it is due: in order, and again after an outage."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from tandem.protos.errors import UnavailableError
from tandem.services.leases import Held, LeaseLoop

TIMEOUT = 20.0


@dataclass(frozen=True)
class Ticket:
    token: int


class Saves:
    """Keeps what is saved last. A save of `older` waits until it is `free`."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = [*errors]
        self.stuck, self.free = threading.Event(), threading.Event()
        self.saved: dict[int, bytes] = {}

    def renew(self, leases: Sequence[Ticket], partials: Mapping[int, bytes]) -> Collection[int]:
        if self.errors:
            raise self.errors.pop()
        if b"older" in partials.values():
            self.stuck.set()
            self.free.wait(TIMEOUT)
        self.saved.update(partials)
        return []


def loop_of(saves: Saves) -> LeaseLoop[Ticket, Any]:
    return LeaseLoop(cast("Any", saves), cast("Any", None), unit="tickets", capacity=1, lease_seconds=60.0)


def test_an_older_result_never_replaces_a_newer_one_even_if_its_save_is_given_up() -> None:
    saves, held = Saves(), Held(Ticket(1))

    async def main() -> None:
        loop = loop_of(saves)
        held.unsaved = lambda: b"older"
        older = asyncio.create_task(loop.save([held]))
        await asyncio.to_thread(saves.stuck.wait, TIMEOUT)
        older.cancel()  # its call goes on in its thread
        held.unsaved = lambda: b"newer"
        newer = asyncio.create_task(loop.save([held]))
        await asyncio.sleep(0.05)
        assert not newer.done() and saves.saved == {}
        saves.free.set()
        assert await asyncio.wait_for(newer, TIMEOUT) == []

    asyncio.run(main())
    assert saves.saved == {1: b"newer"}


def test_what_an_outage_kept_from_being_saved_remains_to_be_saved() -> None:
    saves, held = Saves(UnavailableError("away")), Held(Ticket(1))
    held.unsaved = lambda: b"half"

    async def main() -> None:
        loop = loop_of(saves)
        with pytest.raises(UnavailableError):
            await loop.save([held])
        assert await loop.save([held]) == []

    asyncio.run(main())
    assert saves.saved == {1: b"half"} and held.unsaved is None
