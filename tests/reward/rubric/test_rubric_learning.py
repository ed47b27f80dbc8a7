"""From a rubric to advantages: components stay separate up to the estimator that compares them one by one."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.contracts import ScoreItem
from tandem.protos.errors import ConfigError, DataError
from tandem.protos.types import TrajectoryGroup
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import ScoringCore
from tandem.services.reward.service import scored_row
from tandem.services.run.preflight import check_reward
from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.batch.columns import BatchColumns
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.rewards import learning_targets, reward_components
from tests.support.run_inputs import recipe_of, small_values
from tests.support.training_groups import make_batch, make_group

RUBRIC = """
[[components]]
name = "form"
scorer = "tags"
arguments = { order = [], counts = { form = [1, 1] } }
weight = 0.1
[[components]]
name = "right"
scorer = "rubric"
arguments = { name = "answers" }
data_sources = ["numbers"]
[[components]]
name = "same"
scorer = "exact"
data_sources = ["words"]
[[rubrics.answers.components]]
scorer = "numeric"
"""

FORM = "<form>.</form> "
WEIGHTLESS = ("weight = 0.1", "weight = 0")


def score_group(core: ScoringCore, group: TrajectoryGroup, source: str, texts: list[str]) -> TrajectoryGroup:
    """The group with scored answers, as the reward service stores it and the trainer reads it."""
    items = [ScoreItem(source, text, "7") for text in texts]
    scores = core.score(core.default, items, "ring")
    rows = [scored_row(row.trajectory, score) for row, score in zip(group.scored_rows, scores, strict=True)]
    return decode_group(encode_group(replace(group, rows=tuple(rows))))


def advantages(groups: list[TrajectoryGroup], **options: Any) -> list[float]:
    """The advantage of each row's first token."""
    batch, by_id = make_batch(groups)
    layout = BatchLayout.of(batch, rank=0)
    config = AlgorithmConfig(advantage={"name": "gdpo", "whiten": False, **options})  # type: ignore[arg-type]
    targets = learning_targets(
        layout,
        batch.headers,
        BatchColumns(),
        config,
        components=reward_components(by_id),
        reward_kl_coefficient=0.0,
        max_response_tokens=12,
        seed=0,
    )
    return [float(row[0]) for row in targets.advantages_N.split(layout.lengths_R.tolist())]


def normalised(values: list[float]) -> np.ndarray:
    array = np.array(values)
    return (array - array.mean()) / (array.std(ddof=1) + 1e-6)


@pytest.fixture
def rubric_file(tmp_path: Path) -> Path:
    file = tmp_path / "rubric.toml"
    file.write_text(RUBRIC)
    return file


def test_the_components_of_a_rubric_reach_gdpo(rubric_file: Path) -> None:
    with closing(ScoringCore(RewardConfig(rubric=str(rubric_file)))) as core:
        groups = [
            score_group(core, make_group(0), "numbers", [FORM + "7", "7", FORM + "8", "8"]),
            score_group(core, make_group(1), "words", [FORM + "7", "7", "7", "x"]),
        ]
    assert [row.reward for row in groups[0].scored_rows] == pytest.approx([1.1, 1.0, 0.1, 0.0])
    names = ["form", "form/form", "right", "right/numeric"]
    assert dict(groups[0].scored_rows[0].breakdown) == dict.fromkeys(names, 1.0)
    assert dict(groups[1].scored_rows[1].breakdown) == {"form": 0.0, "form/form": 0.0, "same": 1.0}
    # `same` applies to other data, and `right/numeric` is part of `right`
    first = normalised([1, 0, 1, 0]) + normalised([1, 1, 0, 0])
    second = normalised([1, 0, 0, 0]) + normalised([0, 1, 1, 0])
    assert advantages(groups) == pytest.approx([*first, *second], abs=1e-6)
    weighted = 0.5 * normalised([1, 0, 1, 0]) + 2.0 * normalised([1, 1, 0, 0])
    assert advantages(groups, weights=(0.5, 2.0, 1.0))[:4] == pytest.approx(list(weighted), abs=1e-6)


def test_a_gate_leaves_every_row_with_every_component(rubric_file: Path) -> None:
    rubric_file.write_text(RUBRIC.replace("weight = 0.1", "gate = true"))
    with closing(ScoringCore(RewardConfig(rubric=str(rubric_file)))) as core:
        group = score_group(core, make_group(0), "numbers", [FORM + "7", "7", FORM + "8", "8"])
    assert [row.reward for row in group.scored_rows] == [2.0, 0.0, 1.0, 0.0]
    wanted = normalised([1, 0, 1, 0]) + normalised([1, 0, 0, 0])
    assert advantages([group]) == pytest.approx(list(wanted), abs=1e-6)


def test_a_component_that_some_rows_of_a_group_lack_is_named() -> None:
    group = make_group(0, rewards=[1.0, 0.0, 0.5, 0.5])
    rows = tuple(
        replace(row, breakdown={"a": 1.0} if number == 2 else {"a": 1.0, "b": 0.0, "b/part": 1.0})
        for number, row in enumerate(group.scored_rows)
    )
    with pytest.raises(DataError, match="trajectory 2: its reward lacks the component b"):
        advantages([replace(group, rows=rows)])


@pytest.mark.parametrize(
    ("change", "weights", "told"),
    [
        (("", ""), [], ""),
        (("", ""), [1.0, 1.0], "has 2 entries for the 3 components"),
        (WEIGHTLESS, [], "component form has weight 0, and trainer.advantage gdpo would train on it"),
        (WEIGHTLESS, [0.0, 1.0, 1.0], ""),
        (("weight = 0.1", "optional = true"), [], "component form is optional"),
    ],
)
def test_a_rubric_that_gdpo_cannot_use_is_found_before_the_run(
    rubric_file: Path, tmp_path: Path, change: tuple[str, str], weights: list[float], told: str
) -> None:
    rubric_file.write_text(RUBRIC.replace(*change) if change[0] else RUBRIC)
    trainer = {"advantage": {"name": "gdpo", "weights": weights}}
    recipe = recipe_of(small_values(tmp_path / "inputs"), reward={"rubric": str(rubric_file)}, trainer=trainer)
    if not told:
        check_reward(recipe)
        return
    with pytest.raises(ConfigError) as caught:
        check_reward(recipe)
    assert told in str(caught.value) and "\n" not in str(caught.value)
