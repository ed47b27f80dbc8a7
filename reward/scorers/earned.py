"""No score of its own: the reward is what the trajectory earned."""

from __future__ import annotations

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer


class Earned(Scorer):
    """0 for every answer, so that its reward is what its environment gave it.

    Example:
        >>> Earned().judge(ScoreItem("guess", "7", None)).value
        0.0
    """

    ISOLATION = "in_process"

    def judge(self, item: ScoreItem) -> Score:
        return Scored(0.0)
