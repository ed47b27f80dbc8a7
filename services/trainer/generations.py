"""The samples of an evaluation, one JSON line each, their scores, and the figures of a set computed from them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from tandem.protos import rollout_pb2
from tandem.protos.contracts import JsonObject, Score, ScoreItem, Unscored
from tandem.protos.types import Prompt
from tandem.reward.text.values import last_boxed, last_tagged
from tandem.services.run.json_files import JsonLines
from tandem.trainer.sample_metrics import Mean, PromptSamples, sample_metrics

_ENVIRONMENT = "environment"
"""Reason for which an episode has no reward: its environment failed in every attempt."""
_COUNTED = ("num_tool_calls", "num_invalid_calls", "num_tool_failures")
"""Whole numbers in the `info` of an episode's last step that are summed over a set."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One sample of an evaluation: a line of its file."""

    index: int
    """Row of the set's file, counted from 0."""
    sample: int
    data_source: str
    prompt: Sequence[Mapping[str, object]]
    answer: str
    num_tokens: int
    finish_reason: str
    reward: float | None
    """None if it is unscored."""
    correct: bool
    breakdown: Mapping[str, float]
    unscored: str
    """Why it has no reward; "" if it has one."""
    settings: str
    """Digest of what the sample depends on. Only samples with the same one are used again."""
    episode: JsonObject = field(default_factory=dict)
    """Of an episode: `earned_reward`, and `stop`, `num_turns`, `messages` and `info`, or `error` if its environment
    failed.
    """

    @classmethod
    def from_answer(
        cls, prompt: Prompt, number: int, answer: rollout_pb2.GenerateReply.Sample, settings: str
    ) -> Generation:
        """Sample `number` of a prompt before it is scored."""
        episode = {"earned_reward": answer.earned_reward, **json.loads(answer.episode)} if answer.episode else {}
        return cls(
            index=prompt.index,
            sample=number,
            data_source=prompt.data_source,
            prompt=prompt.messages,
            answer=answer.text,
            num_tokens=len(answer.ids) // 4,
            finish_reason=answer.finish_reason,
            reward=None,
            correct=False,
            breakdown={},
            unscored=_ENVIRONMENT if "error" in episode else "",
            settings=settings,
            episode=episode,
        )

    def item(self, prompt: Prompt) -> ScoreItem:
        """What a scorer judges, of a sample of this prompt."""
        info = dict(prompt.judged_info(self.num_tokens))
        if "messages" in self.episode:
            info["messages"] = self.episode["messages"]
        group = prompt.group_id if prompt.num_samples > 1 else ""
        return ScoreItem(prompt.data_source, self.answer, prompt.ground_truth, info, group)

    def with_score(self, score: Score) -> Generation:
        """The sample with its score, to which what an episode earned is added."""
        if isinstance(score, Unscored):
            return replace(self, reward=None, correct=False, breakdown={}, unscored=score.reason)
        reward, breakdown = score.value, dict(score.breakdown)
        if self.episode:
            earned = self.episode["earned_reward"]
            reward, breakdown = reward + earned, {**(breakdown or {"scorer": reward}), "earned": earned}
        correct = _is_correct(reward, score.breakdown)
        return replace(self, reward=reward, correct=correct, breakdown=breakdown, unscored="")

    @property
    def has_failed(self) -> bool:
        """Whether it is an episode without an end, because its environment failed."""
        return self.unscored == _ENVIRONMENT

    @property
    def has_no_answer(self) -> bool:
        """Whether a scorer says that it found no answer in the text."""
        return any(value == 0.0 for value in parts_named("answered", self.breakdown))

    @property
    def vote(self) -> str | None:
        """What counts for `maj@n`."""
        return None if self.has_no_answer else final_answer(self.answer)


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """The prompts of an evaluation set with their sampling parameters, the rubric ("" for the recipe's), and what is
    played (`EvalEnvironment.key`).
    """

    name: str
    prompts: Sequence[Prompt]
    rubric: str = ""
    environment: str = ""

    def settings(self, *others: str) -> str:
        """Digest of everything that the samples and their scores depend on: the set's and the others, which are the
        weights, the scoring, and the environment if there is one.
        """
        digest = hashlib.blake2b(digest_size=8)
        for one in (*others, self.rubric, *filter(None, [self.environment])):
            digest.update(f"{len(one)}:{one}".encode())
        for prompt in self.prompts:
            known = [prompt.index, prompt.num_samples, asdict(prompt.sampling), prompt.data_source, prompt.ground_truth]
            digest.update(json.dumps([*known, prompt.token_ids.tolist(), prompt.extra_info]).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class SetResult:
    """The figures of one set at one version."""

    num_prompts: int
    num_samples: int
    """Samples that were asked for."""
    num_scored: int
    num_truncated: int
    """Samples that reached the longest length."""
    num_no_answer: int
    """Scored samples in which the scorer found no answer, as far as it says so."""
    unscored: Mapping[str, int]
    """Samples without a score, by reason."""
    episodes: Mapping[str, int] = field(default_factory=dict)
    """Sums over episodes: `num_turns`, `stop_<reason>` for each reason that ended one, and what their environments
    count in `info`: `num_tool_calls`, `num_invalid_calls`, `num_tool_failures`.
    """
    failed: str = ""
    """Why there are no metrics."""
    accuracy: float | None = None
    """mean@n, the share of right samples."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """95 % confidence intervals of the metrics over the prompts."""
    data_sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The metrics of each `data_source`, and its number of prompts."""


def read_generations(file: Path) -> list[Generation]:
    """The stored samples of one set at one version, by prompt."""
    return sorted((Generation(**line) for line in JsonLines(file).read()), key=attrgetter("index", "sample"))


class GenerationsFile:
    """The samples of one set at one version. Each `add` is on disk when it returns. Thread-safe."""

    def __init__(self, file: Path, settings: str) -> None:
        """Reads what an interrupted evaluation with the same settings has left."""
        self._settings = settings
        self._lines = JsonLines(file)
        self._adding = threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)
        self._rows = [Generation(**line) for line in self._lines.read() if line.get("settings") == settings]

    @property
    def rows(self) -> Sequence[Generation]:
        """All samples, by prompt."""
        return sorted(self._rows, key=attrgetter("index", "sample"))

    def keep_complete(self, chunks: Iterable[Sequence[Prompt]]) -> list[Sequence[Prompt]]:
        """Removes the samples of chunks that lack some, and lines of other settings. Returns those chunks."""
        numbers = Counter(row.index for row in self._rows)
        missing = [chunk for chunk in chunks if any(numbers[one.index] < one.num_samples for one in chunk)]
        removed = {prompt.index for chunk in missing for prompt in chunk}
        self._rows = [row for row in self._rows if row.index not in removed]
        self._lines.keep(lambda line: line.get("settings") == self._settings and line["index"] not in removed)
        return missing

    def add(self, rows: Sequence[Generation]) -> None:
        """Appends the samples of a chunk. Raises OSError."""
        with self._adding:
            self._lines.append(*map(asdict, rows))
            self._rows += rows


def parts_named(name: str, breakdown: Mapping[str, float]) -> list[float]:
    """The parts of a breakdown with this name, also those of a rubric's component (`math/answered`)."""
    return [value for key, value in breakdown.items() if key.rpartition("/")[2] == name]


def _is_correct(reward: float, breakdown: Mapping[str, float]) -> bool:
    """Whether the scorer says so (`acc` or `correct` in the breakdown), else whether the reward is at least 1."""
    for name in ("acc", "correct"):
        if found := parts_named(name, breakdown):
            return all(value >= 0.5 for value in found)
    return reward >= 1.0


def final_answer(text: str) -> str:
    r"""What an answer votes for: the last `\boxed{…}`, else the last `<answer>…</answer>`, else what follows the last
    `####`, else the whole text; white space counts as one space.
    """
    boxed = last_boxed(text)
    found = boxed if boxed is not None else last_tagged(text, "answer")
    return " ".join((text.rpartition("####")[2] if found is None else found).split())


def result_of(
    one: EvaluationSet, rows: Sequence[Generation], missing: Mapping[str, int], min_scored: float
) -> SetResult:
    """The figures of a set from its samples by prompt. `missing`: samples that never came, by reason.

    There are no metrics if a smaller share than `min_scored` of the samples has a score.
    """
    scored = [row for row in rows if row.reward is not None]
    unscored = Counter(row.unscored for row in rows if row.reward is None) + Counter(missing)
    num_samples = sum(prompt.num_samples for prompt in one.prompts)
    result = SetResult(
        num_prompts=len(one.prompts),
        num_samples=num_samples,
        num_scored=len(scored),
        num_truncated=sum(row.finish_reason == "length" for row in rows),
        num_no_answer=sum(row.has_no_answer for row in scored),
        unscored=dict(unscored),
        episodes=_episode_sums([row.episode for row in rows if "stop" in row.episode]),
    )
    if not scored or len(scored) < min_scored * num_samples:
        told = f"{len(scored)} of {num_samples} samples have a score, fewer than eval.min_scored = {min_scored:g}"
        return replace(result, failed=f"{told}: {_listed(unscored)}")
    n = max(prompt.num_samples for prompt in one.prompts)
    means = sample_metrics(_by_prompt(scored), n)
    sources = sorted({row.data_source for row in scored})
    return replace(
        result,
        accuracy=means[f"mean@{n}"].value,
        metrics=_values(means),
        intervals={name: (mean.low, mean.high) for name, mean in means.items()},
        data_sources={source: _of_source(scored, source, n) for source in sources},
    )


def _episode_sums(episodes: Sequence[JsonObject]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for one in episodes:
        counted = {name: value for name in _COUNTED if type(value := one["info"].get(name)) is int}
        sums.update({"num_turns": one["num_turns"], f"stop_{one['stop']}": 1, **counted})
    return dict(sums)


def _of_source(scored: Sequence[Generation], source: str, num_samples: int) -> dict[str, float]:
    prompts = _by_prompt([row for row in scored if row.data_source == source])
    return {"num_prompts": len(prompts), **_values(sample_metrics(prompts, num_samples))}


def _by_prompt(rows: Sequence[Generation]) -> list[PromptSamples]:
    prompts = [list(group) for _, group in groupby(rows, key=attrgetter("index"))]
    return [
        PromptSamples([row.reward or 0.0 for row in group], [row.correct for row in group], [row.vote for row in group])
        for group in prompts
    ]


def _values(means: Mapping[str, Mean]) -> dict[str, float]:
    return {name: mean.value for name, mean in means.items()}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in counts.items()) or "no reason was given"
