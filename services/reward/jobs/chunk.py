"""The items of a claimed chunk, and the results they have so far."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protos import reward_pb2
from tandem.protos.contracts import Score, ScoreItem, Unscored
from tandem.services.reward.jobs.store import ChunkClaim
from tandem.services.reward.undecoded_text import chunk_of
from tandem.services.reward.wire import read_items, reply_of, score_of


class Chunk:
    """The items of a claimed chunk, and the results they have so far."""

    def __init__(self, claim: ChunkClaim) -> None:
        messages = chunk_of(claim.items).items
        items, faults = read_items(messages, claim.first_item)
        readable = iter(items)
        self.items: dict[int, ScoreItem] = {n: next(readable) for n in range(len(messages)) if n not in faults}
        self._results: list[Score | None] = [faults.get(n) for n in range(len(messages))]
        if claim.partial:
            for n, message in enumerate(reward_pb2.ScoreReply.FromString(claim.partial).items):
                self._results[n] = self._results[n] or score_of(message)

    def pending(self) -> list[int]:
        """Positions without a result, in order."""
        return [n for n, result in enumerate(self._results) if result is None]

    def units(self, grouped: bool) -> list[list[int]]:
        """Positions without a result, in lists that are scored in one call: the items of a group, if the rubric
        compares them, else one each.
        """
        units: dict[str | int, list[int]] = {}
        for n in self.pending():
            units.setdefault((grouped and self.items[n].group) or n, []).append(n)
        return list(units.values())

    def enter(self, positions: Sequence[int], scores: Sequence[Score]) -> None:
        """Sets the results of these positions."""
        for n, score in zip(positions, scores, strict=True):
            self._results[n] = score

    def enter_all(self, reason: Unscored) -> None:
        """Sets this result for every item without one."""
        self._results = [result or reason for result in self._results]

    def forget_infrastructure(self, grouped: bool) -> bool:
        """Removes the results of items whose scorer was unreachable, and of their groups if the rubric compares items.

        Returns whether any item is now without a result.
        """
        failed = {
            n for n, one in enumerate(self._results) if isinstance(one, Unscored) and one.reason == "infrastructure"
        }
        groups = {self.items[n].group for n in failed} - {""} if grouped else set()
        for n, item in self.items.items():
            if n in failed or item.group in groups:
                self._results[n] = None
        return bool(self.pending())

    def results(self) -> list[Score]:
        """One result for each item, in order."""
        results = [result for result in self._results if result is not None]
        assert len(results) == len(self._results), "an item of a finished chunk has no result"
        return results

    def partial(self) -> bytes:
        """The results so far; an item without a result is an empty message."""
        items = [
            reward_pb2.ScoreReply.Item() if result is None else reply_of([result]).items[0] for result in self._results
        ]
        return reward_pb2.ScoreReply(items=items).SerializeToString()
