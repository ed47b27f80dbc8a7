"""Decides whose fault it is that an answer has no score. An answer that is at fault gets its scorer's worst score, so
that it cannot avoid a penalty, or have its group dropped, by making the scorer fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tandem.protos.contracts import FAULT, Score, Scored, ScoreItem, Unscored
from tandem.reward.scheduling.cancellation import CANCELLED

Ask = Callable[[Sequence[ScoreItem]], list[Score]]
"""Judges items once more, each alone and in a fresh process if the scorer runs in one."""


class AnswerFaults:
    """The decisions about one service's answers. Thread-safe.

    An answer without a score is judged once more. If that fails as well, the scorer is asked for a control: another
    answer to the same question that it has scored. Without one, the controls are an empty answer to the question and,
    if the scorer may wait for something outside the service, the answer that it scored last. The answer is at fault if
    all controls get a score now: then neither the question nor the scorer nor the machine is. Else it keeps its reason.

    The worst score is the lowest that the scorer has given so far, at most 0; where a higher score lowers the reward,
    the highest so far, at least 1.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[str, tuple[float, float]] = {}
        self._scored_last: dict[str, ScoreItem] = {}

    def decide(
        self,
        scorer: str,
        items: Sequence[ScoreItem],
        scores: Sequence[Score],
        ask: Ask,
        *,
        settled: Sequence[ScoreItem] = (),
        outside: bool = True,
        rising: bool = True,
    ) -> list[Score]:
        """The scores, with a worst score for every answer that is at fault. `infrastructure` is nobody's fault.

        Args:
            scorer: its key; ranges are kept by it.
            items: answers, with their `scores`.
            settled: other answers, which have a score.
            outside: whether the scorer may wait for something outside the service.
            rising: whether a higher score raises the reward.
        """
        decided = list(scores)
        if suspects := _suspects(decided):
            for number, score in zip(suspects, ask([items[number] for number in suspects]), strict=True):
                decided[number] = score
        scored = [item for item, score in zip(items, decided, strict=True) if isinstance(score, Scored)]
        self._note(scorer, decided, scored)
        asked: list[tuple[ScoreItem, list[Score] | None]] = []
        scores_before = [*decided]
        for number, reason in _suspects(decided).items():
            item = items[number]
            controls, known = next(((found, True) for one, found in asked if _same_question(one, item)), (None, False))
            if not known:
                controls = self._controls(scorer, item, scored, settled, ask, outside)
                asked.append((item, controls))
            if controls is not None:
                parts = {**_worst_parts([*scores_before, *controls], rising), f"{FAULT}{reason}": 1.0}
                low, high = self._ranges[scorer]
                decided[number] = Scored(low if rising else high, parts)
        return decided

    def _controls(
        self,
        scorer: str,
        item: ScoreItem,
        scored: Sequence[ScoreItem],
        settled: Sequence[ScoreItem],
        ask: Ask,
        outside: bool,
    ) -> list[Score] | None:
        """The scores that other answers to the item's question get now; None if a control gets none."""
        others = [one for one in scored if _same_question(one, item)][:1]
        # What the settled ones got from this scorer is not known here, and the worst score must not be above it.
        others = others or [one for one in settled if _same_question(one, item)]
        controls = others or [item._replace(solution="")]
        if not others and outside:
            last = self._scored_last.get(scorer)
            if last is None:
                return None
            controls = [*controls, last]
        scores = ask(controls)
        if not all(isinstance(score, Scored) for score in scores):
            return None
        self._note(scorer, scores, [])
        return scores[:1] if not others else scores

    def _note(self, scorer: str, scores: Sequence[Score], scored: Sequence[ScoreItem]) -> None:
        """Widens the range of the scorer's scores so far, and keeps an item that it has scored."""
        values = [score.value for score in scores if isinstance(score, Scored)]
        with self._lock:
            low, high = self._ranges.get(scorer, (0.0, 1.0))
            self._ranges[scorer] = min([low, *values]), max([high, *values])
            if scored:
                self._scored_last[scorer] = scored[0]


def _same_question(one: ScoreItem, other: ScoreItem) -> bool:
    return one.data_source == other.data_source and one.ground_truth == other.ground_truth


def _worst_parts(scores: Sequence[Score], rising: bool) -> dict[str, float]:
    """Every part of the breakdown that scored answers have, at its worst: some estimators compare the parts."""
    worse, parts = min if rising else max, dict[str, float]()
    for score in scores:
        for name, value in score.breakdown.items() if isinstance(score, Scored) else ():
            parts[name] = worse(parts.get(name, 0.0), value)
    return parts


def _suspects(scores: Sequence[Score]) -> dict[int, str]:
    """The numbers of the answers that may be at fault for having no score, and its reason."""
    return {
        number: score.reason
        for number, score in enumerate(scores)
        if isinstance(score, Unscored) and score.reason != "infrastructure" and score is not CANCELLED
    }
