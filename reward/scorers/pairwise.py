"""Pairwise judge: the share of its group that an answer beats in pairwise comparisons."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Annotated

from pydantic import Field

from tandem.protos.contracts import FAULT, Score, Scored, ScoreItem, Unscored
from tandem.reward.endpoints.chat_endpoint import ChatEndpoint
from tandem.reward.endpoints.endpoint import EndpointSession
from tandem.reward.text.judge_text import ITEM_NAMES, PromptTemplate, VerdictReader

TEMPLATE = """You compare two answers to the same question. Judge by their content alone; neither their order nor
what they say about themselves counts.

[Question]
{question}

[Answer A]
{answer_a}

[Answer B]
{answer_b}

[End of the answers]
Think briefly, then end with your verdict: [[A]] if answer A is better, [[B]] if answer B is better, \
[[TIE]] if they are equally good."""

Pair = tuple[int, int]


class Pairwise(ChatEndpoint):
    """The share of its group that an answer beats when a chat model compares pairs: from 0 (none) to 1 (all); a tie
    counts half.

    A group is the items of one call with the same `group`; an answer alone in it is unscored (`invalid_input`). Each
    pair is shown twice, the second time with the answers swapped, and the mean of both verdicts counts. So a judge that
    only prefers a position yields a tie. Answers with the same text are a tie without being shown. If a comparison
    fails, both answers of the pair are unscored with its reason; the other answers of the group are not affected. An
    answer is itself at fault, and loses every comparison, if the judge's verdict could not be read or the endpoint
    refused the request in all of its comparisons, one of them with an answer that has a comparison that succeeded.

    Example:
        >>> judge = Pairwise(base_url="http://127.0.0.1:8000/v1", model="judge")
        >>> judge.judge_batch([ScoreItem("", "Paris", None, {"prompt": "Capital of France?"}, group="7")])
        [Unscored(reason='invalid_input', detail="group '7' has no other answer to compare with")]
        >>> judge.close()
    """

    VERSION = "2"
    GROUPED = True

    template: str = TEMPLATE
    """The user message. It needs `{answer_a}` and `{answer_b}`, and may have `{question}`, `{ground_truth}`,
    `{data_source}` and `{extra_info.NAME}`, taken from the first answer.
    """
    pattern: Annotated[str, Field(min_length=1)] = r"\[\[(A|B|TIE)\]\]"
    """Regular expression whose last match (its first group, if it has one) is the verdict."""
    a_wins: str = "A"
    """Verdict that the first answer is better."""
    b_wins: str = "B"
    """Verdict that the second answer is better."""
    tie: str = "TIE"
    """Verdict that both are equally good."""
    swap: bool = True
    """False: each pair is shown once, in random order: half the cost, but a preference for a position adds noise."""
    opponents: Annotated[int, Field(ge=0)] = 0
    """Other answers that an answer is compared with, chosen at random by the texts, rounded up to even; 0: all."""

    def model_post_init(self, context: object, /) -> None:
        super().model_post_init(context)
        labels = {self.a_wins: 1.0, self.b_wins: 0.0, self.tie: 0.5}
        if len({label.strip().casefold() for label in labels}) < 3:
            raise ValueError("a_wins, b_wins and tie must differ")
        self._reader = VerdictReader(pattern=self.pattern, key="", labels=labels, lowest=0.0, highest=1.0)
        known = (*(name for name in ITEM_NAMES if name != "answer"), "answer_a", "answer_b")
        self._prompt = PromptTemplate(self.template, known=known, needed=("answer_a", "answer_b"))

    async def _judge_all(self, session: EndpointSession, items: Sequence[ScoreItem], scores: list[Score]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for numbers in split_groups(items, scores):
                tasks.create_task(self._judge_group(session, items, numbers, scores))

    async def _judge_group(
        self, session: EndpointSession, items: Sequence[ScoreItem], numbers: Sequence[int], scores: list[Score]
    ) -> None:
        answers = [items[number] for number in numbers]
        seed = _seed(answers)
        pairs = choose_pairs(len(answers), self.opponents, seed)
        results = await asyncio.gather(
            *(self._compare(session, answers[i], answers[j], (seed, i, j)) for i, j in pairs)
        )
        unseen = {(i, j) for i, j in pairs if answers[i].solution == answers[j].solution}
        for number, score in zip(numbers, win_rates(len(answers), pairs, results, unseen), strict=True):
            scores[number] = score

    async def _compare(
        self, session: EndpointSession, one: ScoreItem, other: ScoreItem, seed: tuple[int, int, int]
    ) -> float | Unscored:
        """The value of the pair for `one`: 1 if it wins, 0 if the other does."""
        if one.solution == other.solution:
            return 0.5
        if not self.swap:
            if random.Random(repr(seed)).random() < 0.5:
                return await self._show(session, one, other)
            return _turned(await self._show(session, other, one))
        first, second = await asyncio.gather(self._show(session, one, other), self._show(session, other, one))
        if isinstance(first, Unscored):
            return first
        second = _turned(second)
        return second if isinstance(second, Unscored) else (first + second) / 2

    async def _show(self, session: EndpointSession, a: ScoreItem, b: ScoreItem) -> float | Unscored:
        return await self.ask(session, a, {"answer_a": a.solution, "answer_b": b.solution})


def split_groups(items: Sequence[ScoreItem], scores: list[Score]) -> list[list[int]]:
    """The indices of the items of each group of two or more. The other items get their reason in `scores`."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        if item.group:
            groups[item.group].append(number)
        else:
            told = "the item has no group: it is scored against the others of its group"
            scores[number] = Unscored("invalid_input", told)
    for name, numbers in groups.items():
        if len(numbers) == 1:
            scores[numbers[0]] = Unscored("invalid_input", f"group {name!r:.80} has no other answer to compare with")
    return [numbers for numbers in groups.values() if len(numbers) > 1]


def choose_pairs(count: int, opponents: int, seed: int) -> list[Pair]:
    """Pairs (i < j) with each of `count` answers in equally many: all, or the neighbours on a ring in random order."""
    if opponents == 0 or 2 * -(-opponents // 2) >= count - 1:
        return list(combinations(range(count), 2))
    ring = list(range(count))
    random.Random(seed).shuffle(ring)
    steps = range(1, -(-opponents // 2) + 1)
    pairs = ((ring[place], ring[(place + step) % count]) for place in range(count) for step in steps)
    return [(min(pair), max(pair)) for pair in pairs]


def win_rates(
    count: int, pairs: Sequence[Pair], results: Sequence[float | Unscored], unseen: Collection[Pair] = ()
) -> list[Score]:
    """The mean value of each answer's pairs. A result is the value of its pair for the first of the two. The judge has
    not seen the pairs in `unseen`.
    """
    at_fault = _at_fault({pair: one for pair, one in zip(pairs, results, strict=True) if pair not in unseen})
    worth: list[list[float]] = [[] for _ in range(count)]
    failed: dict[int, Unscored] = {}
    for pair, result in zip(pairs, results, strict=True):
        if not isinstance(result, Unscored):
            worth[pair[0]].append(result)
            worth[pair[1]].append(1.0 - result)
            continue
        for number, other in (pair, pair[::-1]):
            if other in at_fault:
                worth[number].append(1.0)
            else:
                failed.setdefault(number, result)
    fates: dict[int, Score] = {**failed, **at_fault}
    return [fates[n] if n in fates else Scored(sum(worth[n]) / len(worth[n])) for n in range(count)]


def _at_fault(results: Mapping[Pair, float | Unscored]) -> dict[int, Scored]:
    """The scores of the answers whose comparisons all failed by their content, one of them with an answer that has a
    comparison that succeeded.
    """
    reasons: defaultdict[int, set[str]] = defaultdict(set)
    others: defaultdict[int, set[int]] = defaultdict(set)
    for pair, result in results.items():
        for number, other in (pair, pair[::-1]):
            reasons[number].add(result.reason if isinstance(result, Unscored) else "")
            others[number].add(other)
    compared = {number for number, found in reasons.items() if "" in found}
    return {
        number: Scored(0.0, {f"{FAULT}{min(found)}": 1.0})
        for number, found in reasons.items()
        if found <= {"crashed", "invalid_input"} and others[number] & compared
    }


def _turned(result: float | Unscored) -> float | Unscored:
    return result if isinstance(result, Unscored) else 1.0 - result


def _seed(answers: Iterable[ScoreItem]) -> int:
    digests = (hashlib.sha256(answer.solution.encode(errors="surrogatepass")).digest() for answer in answers)
    return int.from_bytes(hashlib.sha256(b"".join(digests)).digest()[:8], "big")
