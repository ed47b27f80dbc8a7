"""`tandem eval RUN --rescore SCORER`: scores the stored samples of a run's evaluations with another scorer."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import numpy as np

from tandem.protos.error_text import printable
from tandem.protos.errors import ConfigError, DataError
from tandem.protos.types import Prompt, SamplingParameters
from tandem.reward.scoring import ScoringCore
from tandem.services.command_line import print_error, print_text
from tandem.services.commands.evaluate import print_set
from tandem.services.config import Recipe, load_recipe
from tandem.services.data.dataset import Dataset, Row
from tandem.services.run.folder import CONFIG_FILE, cannot_write, write_text
from tandem.services.run.json_files import EVALUATIONS_FILE, GENERATIONS_FOLDER, JsonLines
from tandem.services.trainer.evaluation import Evaluation
from tandem.services.trainer.generations import EvaluationSet, Generation, read_generations, result_of

RESCORED_FOLDER = "rescored"
_PROMPTS_AT_ONCE = 64


def score_stored_samples(target: Path, scorer: str, overrides: Sequence[str]) -> int:
    """Scores the samples of a run folder, or those in one of its files. Writes results and scores below the folder's
    `rescored/`, prints the results, and returns the exit code: 1 if a set failed.

    Raises ConfigError if there are no samples, DataError if a set's file has other prompts now, ScorerError.
    """
    run, files = _files(target)
    recipe = load_recipe(run / CONFIG_FILE, overrides)
    config = recipe.reward
    arguments = config.arguments if scorer == config.scorer else {}
    folder = run / RESCORED_FOLDER / re.sub(r"[^A-Za-z0-9._-]", "_", scorer).lstrip("-.")[-64:]
    failures: list[str] = []
    with closing(
        ScoringCore(config.model_copy(update={"scorer": scorer, "arguments": arguments, "rubric": ""}))
    ) as core:
        for file in files:
            started = time.monotonic()
            stored = list(_samples_by_prompt(recipe, file))
            before = [row for _, samples in stored for row in samples]
            starts = range(0, len(stored), _PROMPTS_AT_ONCE)
            rows = [row for start in starts for row in _scored(core, stored[start : start + _PROMPTS_AT_ONCE])]
            one = EvaluationSet(file.stem, [prompt for prompt, _ in stored])
            result = result_of(one, rows, {}, recipe.eval.min_scored)
            seconds = time.monotonic() - started
            evaluation = Evaluation.of(int(file.parent.name), {file.stem: result}, recipe, seconds)
            _write(folder, evaluation, rows)
            failures += evaluation.failures
            print_text(f"{file.stem}: version {evaluation.version}, scored with {scorer}")
            print_set(result)
            changed = sum(old.correct != new.correct for old, new in zip(before, rows, strict=True))
            print(f"  {changed} of {len(rows)} samples are right with one of the scorers and wrong with the other")
    print_text(f"scores are in {folder}")
    for failure in failures:
        print_error(failure)
    return int(bool(failures))


def _files(target: Path) -> tuple[Path, list[Path]]:
    """The run folder, and its files of samples by version. Raises ConfigError if there are none."""
    run = target.parent if target.name == CONFIG_FILE else target
    if target.suffix == ".jsonl":
        run = target.absolute().parent.parent.parent
    found = [one for one in (run / GENERATIONS_FOLDER).glob("[0-9]*/*.jsonl") if one.parent.name.isdigit()]
    if target.suffix == ".jsonl":
        found = [one for one in found if one == target.absolute()]
    if not found or not (run / CONFIG_FILE).is_file():
        told = f"name a run folder that has evaluated, or one of its files {GENERATIONS_FOLDER}/VERSION/SET.jsonl"
        raise ConfigError(f"{printable(str(target))} has no stored samples of evaluations; {told}")
    return run, sorted(found, key=lambda one: (int(one.parent.name), one.name))


def _samples_by_prompt(recipe: Recipe, file: Path) -> Iterator[tuple[Prompt, list[Generation]]]:
    """The samples of a file by prompt. The prompts' ground truths are in the set's own file."""
    own = next((one for one in recipe.eval_sets if one.name == file.stem), None)
    if own is None:
        names = ", ".join(one.name for one in recipe.eval_sets)
        raise ConfigError(f"{file}: the recipe has no evaluation set {file.stem}; it has {names or 'none'}")
    dataset = Dataset(own.file)
    for _, samples in groupby(read_generations(file), key=attrgetter("index")):
        of_prompt = list(samples)
        yield _prompt(dataset, of_prompt), of_prompt


def _prompt(dataset: Dataset, samples: Sequence[Generation]) -> Prompt:
    index = samples[0].index
    row = dataset.row(index) if index < len(dataset) else None
    if not isinstance(row, Row) or list(row.messages) != list(samples[0].prompt):
        told = "is not the prompt of the stored samples; put back the file that the run used"
        raise DataError(f"dataset {dataset.file}: row {index} {told}")
    return Prompt(
        epoch=0,
        index=index,
        token_ids=np.empty(0, np.int32),
        num_samples=len(samples),
        sampling=SamplingParameters(),
        data_source=row.data_source,
        ability=row.ability,
        ground_truth=row.ground_truth,
        messages=row.messages,
        extra_info=row.extra_info,
    )


def _scored(core: ScoringCore, stored: Sequence[tuple[Prompt, Sequence[Generation]]]) -> list[Generation]:
    """The samples with new scores. Episodes whose environment failed have none."""
    items = [row.item(prompt) for prompt, samples in stored for row in samples if not row.has_failed]
    scores = iter(core.score(core.default, items, "calls"))
    return [row if row.has_failed else row.with_score(next(scores)) for _, samples in stored for row in samples]


def _write(folder: Path, evaluation: Evaluation, rows: Sequence[Generation]) -> None:
    """Writes a set's samples of a version, and the line of the version, in place of earlier ones."""
    ((name, _),) = evaluation.sets.items()
    samples = folder / f"{evaluation.version:06d}" / f"{name}.jsonl"
    lines = JsonLines(folder / EVALUATIONS_FILE)
    try:
        samples.parent.mkdir(parents=True, exist_ok=True)
        write_text(samples, "".join(json.dumps(asdict(row)) + "\n" for row in rows))
        lines.keep(lambda line: line["version"] != evaluation.version or name not in line["sets"])
        lines.append(asdict(evaluation))
    except OSError as error:
        raise cannot_write(folder, error) from None
