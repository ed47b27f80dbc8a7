"""What a report shows of a run, read from its folder. Works for finished, stopped and running runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.protos.codec import decode_group
from tandem.protos.errors import DataError
from tandem.protos.types import ScoredTrajectory, TrajectoryGroup
from tandem.services.config import Recipe, load_resolved
from tandem.services.run.folder import CONFIG_FILE, SUMMARY_FILE
from tandem.services.run.json_files import (
    EVALUATIONS_FILE,
    GENERATIONS_FOLDER,
    METRICS_FILE,
    JsonLines,
    Line,
)
from tandem.services.run.metrics import summarise
from tandem.services.trainer.generations import Generation, read_generations
from tandem.trainer.batch.record import read_record, recorded_versions

_GROUPS_SHOWN = 3  # of each batch that is shown
_ANSWERS_SHOWN = 2  # right ones and as many wrong ones, of each set


@dataclass(frozen=True, slots=True)
class RunData:
    """A run: its configuration, the lines of metrics.jsonl, its evaluations by version, and its summary."""

    folder: Path
    name: str
    recipe: Recipe
    lines: Sequence[Line]
    evaluations: Sequence[Line]
    summary: Mapping[str, Any]
    is_finished: bool

    @classmethod
    def load(cls, folder: Path) -> RunData:
        """Reads a run folder. Raises ConfigError for an unreadable configuration, DataError for unreadable figures."""
        recipe = load_resolved(folder / CONFIG_FILE)
        try:
            return cls._with_figures(folder, recipe)
        except ValueError as error:
            raise DataError(f"{folder}: its metrics, evaluations or summary cannot be read: {error}") from error

    @classmethod
    def _with_figures(cls, folder: Path, recipe: Recipe) -> RunData:
        lines, evaluations = (JsonLines(folder / name).read() for name in (METRICS_FILE, EVALUATIONS_FILE))
        evaluations.sort(key=lambda line: int(line["version"]))
        file = folder / SUMMARY_FILE
        if file.exists():
            summary = json.loads(file.read_text(encoding="utf-8"))
        else:
            seconds = lines[-1]["time"] - lines[0]["time"] + lines[0]["seconds_total"] if lines else 0.0
            summary = summarise(recipe, lines, evaluations, {}, seconds)
        return cls(folder, recipe.run.run_id, recipe, lines, evaluations, summary, file.exists())

    def samples(self) -> Iterator[tuple[int, list[Sample]]]:
        """Version and samples of the first, middle and last recorded batch: of some groups the answers with the highest
        and the lowest reward.
        """
        versions = recorded_versions(self.folder)
        for version in sorted({versions[0], versions[len(versions) // 2], versions[-1]}) if versions else ():
            payloads = list(read_record(self.folder, version)[1].values())[:_GROUPS_SHOWN]
            yield version, [sample for payload in payloads for sample in _extremes(decode_group(payload))]

    def evaluated_samples(self) -> Iterator[tuple[str, int, list[EvaluatedSample]]]:
        """Name, version and samples of each evaluation set at the first and the last version of which there are
        samples: some right and some wrong ones.
        """
        files = [one for one in (self.folder / GENERATIONS_FOLDER).glob("[0-9]*/*.jsonl") if one.parent.name.isdigit()]
        for name in sorted({file.stem for file in files}):
            own = sorted((file for file in files if file.stem == name), key=lambda file: int(file.parent.name))
            for file in dict.fromkeys((own[0], own[-1])):
                rows = [row for row in read_generations(file) if row.reward is not None]
                right, wrong = ([row for row in rows if row.correct is kind][:_ANSWERS_SHOWN] for kind in (True, False))
                yield name, int(file.parent.name), [_evaluated(row) for row in (*right, *wrong)]


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """One answer of an evaluation, or the conversation of an episode."""

    generation: Generation
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One trained answer."""

    group_id: str
    prompt: str
    answer: str
    reward: float
    breakdown: Mapping[str, float]
    versions: str
    """The versions that sampled it, e.g. `3` or `3 → 4`."""
    num_tokens: int
    finish_reason: str


def _extremes(group: TrajectoryGroup) -> Iterator[Sample]:
    rows = [row for row in group.scored_rows if row.reward is not None and row.trajectory.role == "policy"]
    rows.sort(key=lambda row: -(row.reward or 0.0))
    chosen = [rows[0], rows[-1]] if rows and rows[0].reward != rows[-1].reward else rows[:1]
    return (_sample(group, row) for row in chosen)


def _sample(group: TrajectoryGroup, row: ScoredTrajectory) -> Sample:
    trajectory, prompt = row.trajectory, group.prompt
    spans = [span.policy_version for segment in trajectory.segments for span in segment.spans]
    return Sample(
        group.group_id,
        _text(prompt.messages[-1]["content"]) if prompt.messages else f"({len(prompt.token_ids)} tokens)",
        trajectory.text,
        row.reward or 0.0,
        row.breakdown,
        " → ".join(str(version) for version in dict.fromkeys(spans)),
        sum(segment.num_loss_tokens for segment in trajectory.segments),
        trajectory.finish_reason,
    )


def _evaluated(row: Generation) -> EvaluatedSample:
    answers = row.episode["messages"][len(row.prompt) :] if row.episode else ()
    conversation = "\n\n".join(f"{one['role']}: {_said(one)}" for one in answers)
    prompt = _text(row.prompt[-1]["content"]) if row.prompt else ""
    return EvaluatedSample(row, prompt, conversation or row.answer)


def _said(message: Mapping[str, object]) -> str:
    """A message's text, with the tools that it calls."""
    parts = (message.get("content"), message.get("tool_calls"))
    return "\n".join(_text(part) for part in parts if part)


def _text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
