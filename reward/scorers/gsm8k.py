"""GSM8K: the number after `####`, compared as text."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.text.values import accepted_texts, unusable

_RUN = r"-?[0-9.,]+"
_MARKED = re.compile(f"#### ({_RUN})")
_ANYWHERE = re.compile(_RUN)


class Gsm8k(Scorer):
    """1 if the number after the last `#### ` is written exactly as the ground truth, `format_score` for another number,
    else 0.

    Numbers are compared as text, so `3.50` is not `3.5` and `42.` is not `42`. Published GSM8K rewards follow this rule
    (answers as in arXiv:2110.14168). For a tolerant comparison use `numeric` with `marker = "####"`.

    Example:
        >>> Gsm8k().judge(ScoreItem("openai/gsm8k", "8 * 9 = 72, and 1,000 more.\\n#### 1,072", "1072"))
        Scored(value=1.0, breakdown={'answered': 1.0})
    """

    ISOLATION = "in_process"

    method: Literal["strict", "flexible"] = "strict"
    """`strict`: the number after `#### `, without its commas. `flexible`: the last run of digits, dots and commas."""
    format_score: float = 0.0
    """Score of an answer with a wrong number."""
    last_characters: Annotated[int, Field(ge=0)] = 300
    """Number of characters at the end of the answer that are read; 0: all."""

    def judge(self, item: ScoreItem) -> Score:
        accepted = accepted_texts(item.ground_truth)
        if accepted is None:
            return unusable(item.ground_truth)
        strict = self.method == "strict"
        runs = (_MARKED if strict else _ANYWHERE).findall(item.solution[-self.last_characters :])
        if not runs:
            return Scored(0.0, {"answered": 0.0})
        # Flexible: the last run that is not just a full stop; the first run if all of them are.
        answer = runs[-1].replace(",", "") if strict else next((run for run in reversed(runs) if run != "."), runs[0])
        return Scored(1.0 if answer in accepted else self.format_score, {"answered": 1.0})
