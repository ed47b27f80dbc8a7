"""A weighted priority queue: who is served next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

Priority = Literal["ring", "calls", "jobs"]
PRIORITIES: tuple[Priority, ...] = ("ring", "calls", "jobs")
"""Highest first: groups that training waits for, calls that a client waits for, jobs that run for hours."""
SHARE = 4
"""While a lower priority waits, every fourth turn goes to it."""

T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """One first-in-first-out queue per priority. The highest priority goes first, except for the share of turns that
    goes to lower ones, so none starves. Not thread-safe.

    It orders all that is scarce: worker processes, the interpreter, requests and money of judges, forward passes.
    """

    def __init__(self) -> None:
        self._waiting: dict[Priority, deque[T]] = {priority: deque() for priority in PRIORITIES}
        self._turns = dict.fromkeys(PRIORITIES, 0)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waiting(self, priority: Priority) -> int:
        return len(self._waiting[priority])

    def add(self, priority: Priority, entry: T) -> None:
        self._waiting[priority].append(entry)

    def push_front(self, priority: Priority, entry: T, index: int = 0) -> None:
        """Inserts an entry at the front of the queue of its priority, behind the first `index` entries."""
        self._waiting[priority].insert(index, entry)

    def remove(self, priority: Priority, entry: T) -> bool:
        try:
            self._waiting[priority].remove(entry)
        except ValueError:
            return False
        return True

    def first(self, priority: Priority) -> T | None:
        return self._waiting[priority][0] if self._waiting[priority] else None

    def peek(self) -> tuple[Priority, T] | None:
        """The next entry, left in the queue; None if the queue is empty."""
        busy = self._busy()
        if not busy:
            return None
        priority = busy[self._next_index(busy)]
        return priority, self._waiting[priority][0]

    def pop(self) -> tuple[Priority, T] | None:
        """Removes and returns the next entry; None if the queue is empty."""
        found = self.peek()
        if found is not None:
            self._take_turn(self._busy())
            self._waiting[found[0]].popleft()
        return found

    def pop_from(self, priority: Priority) -> T:
        """Removes and returns the first entry of one priority, as part of the turn that `pop` gave to it."""
        return self._waiting[priority].popleft()

    def try_continue(self, priority: Priority) -> bool:
        """Takes one more turn for an entry that was popped and has work left; False if another priority is next."""
        busy = [other for other in PRIORITIES if other == priority or self._waiting[other]]
        is_next = busy[self._next_index(busy)] == priority
        if is_next:
            self._take_turn(busy)
        return is_next

    def clear(self) -> list[T]:
        everything = [entry for priority in PRIORITIES for entry in self._waiting[priority]]
        for queue in self._waiting.values():
            queue.clear()
        return everything

    def _busy(self) -> list[Priority]:
        return [priority for priority in PRIORITIES if self._waiting[priority]]

    def _next_index(self, busy: Sequence[Priority]) -> int:
        """Index of the priority that has the next turn: one that took SHARE - 1 turns leaves the next to lower ones."""
        index = 0
        while index + 1 < len(busy) and self._turns[busy[index]] + 1 >= SHARE:
            index += 1
        return index

    def _take_turn(self, busy: Sequence[Priority]) -> None:
        index = self._next_index(busy)
        for passed in busy[:index]:
            self._turns[passed] = 0
        if index + 1 < len(busy):
            self._turns[busy[index]] += 1
