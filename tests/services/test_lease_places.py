"""Leases whose work waits for others leave their places in the lease loop to further ones."""

from __future__ import annotations

import asyncio

from tests.services.test_leases import Loop, Queue, Worker, run, until


class Waiting(Worker):
    """The test says how many of its leases wait."""

    waiting = 0

    def num_waiting(self) -> int:
        return self.waiting


def test_as_many_leases_as_wait_are_held_beyond_the_capacity() -> None:
    queue, worker = Queue(*"abcdef"), Waiting()
    answers = False
    worker.may_answer = lambda name: answers

    async def wait(loop: Loop) -> None:
        nonlocal answers
        for waiting in (1, 3):
            worker.waiting = waiting
            await until(lambda waiting=waiting: loop.num_held == 2 + waiting)  # type: ignore[misc]
        worker.waiting = 0
        await asyncio.sleep(0.05)
        assert loop.num_held == 5 and worker.began == list("abcde"), "none is taken away"
        await until(lambda: loop.is_overloaded)
        assert loop.figures()["tickets_free"] == 0
        answers = True
        await until(lambda: len(queue.completed) == 6)

    run(queue, worker, lambda loop: loop.num_held == 2, wait, capacity=2)
