"""Short answers: exact match, contained match or F1 of words, as in question answering with search."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.scorers.tags import check_names
from tandem.reward.text.values import accepted_texts, last_tagged, unusable

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ShortAnswer(Scorer):
    """How well the last `<answer>…</answer>` agrees with the ground truth, or with the best of several.

    Both are normalised first: case, ASCII punctuation, articles and extra spaces are removed (SQuAD, arXiv:1606.05250).
    The ground truth is a text, a list of texts, or `{"target": …}` with either, as in data sets for question answering
    with search (Search-R1, arXiv:2503.09516). The breakdown has exact match and F1, whatever the metric.

    Example:
        >>> ShortAnswer(metric="f1").judge(ScoreItem("nq", "<answer>Lake Victoria</answer>", ["Victoria"])).value
        0.6666666666666666
    """

    ISOLATION = "in_process"

    metric: Literal["exact", "contained", "f1"] = "exact"
    """`exact`: they are equal. `contained`: a ground truth is in the answer ("subem"). `f1`: the F1 of their words."""
    format_score: float = 0.0
    """Score of an answer that is present but would score 0."""
    tag: str = "answer"
    """Only the content of the last `<tag>…</tag>` is read; empty: the whole answer."""
    max_tags: Annotated[int, Field(ge=0)] = 10
    """With more such tags than this an exact match scores a quarter, so that guesses do not pay; 0: no limit."""

    @model_validator(mode="after")
    def _tag_is_a_name(self) -> Self:
        check_names([self.tag] if self.tag else [])
        return self

    def judge(self, item: ScoreItem) -> Score:
        truth = item.ground_truth
        target = truth.get("target") if isinstance(truth, Mapping) else truth
        accepted = accepted_texts(target)
        if accepted is None:
            shown = target if isinstance(target, list) else truth
            return unusable(shown, "neither text, number, list of those nor a table with one of them as `target`")
        answer = last_tagged(item.solution, self.tag) if self.tag else item.solution
        if answer is None:
            return Scored(0.0, {"answered": 0.0, "exact": 0.0, "f1": 0.0})
        answer, texts = normalised(answer), [normalised(text) for text in accepted]
        exact = float(answer in texts)
        words = Counter(answer.split())
        f1 = max(_f1(words, text.split()) for text in texts)
        value = exact if self.metric == "exact" else f1 if self.metric == "f1" else float(_contains(answer, texts))
        if self.metric == "exact" and self.tag and self.max_tags:
            tags = max(item.solution.count(f"<{self.tag}>"), item.solution.count(f"</{self.tag}>"))
            value /= 4 if tags > self.max_tags else 1
        return Scored(value or self.format_score, {"answered": 1.0, "exact": exact, "f1": f1})


def normalised(text: object) -> str:
    """Lower case, without ASCII punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", str(text).lower().translate(_NO_PUNCTUATION)).split())


def _contains(answer: str, texts: list[str]) -> bool:
    # A ground truth that is empty after normalisation ("The") would otherwise be part of every answer.
    return any(text in answer if text else not answer for text in texts)


def _f1(words: Counter[str], truth: list[str]) -> float:
    if not words or not truth:
        return float(not words and not truth)
    return 2 * (Counter(truth) & words).total() / (words.total() + len(truth))  # only the words of the truth are read
