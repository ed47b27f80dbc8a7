"""`tandem eval RUN --rescore SCORER`: stored samples and their scores by another scorer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.errors import ConfigError, DataError, ScorerError
from tandem.services.commands.rescore import score_stored_samples
from tandem.services.config import dump_recipe
from tandem.services.run.json_files import JsonLines
from tandem.services.trainer.generations import Generation, read_generations
from tests.support.dataset_files import verl_row, write_lines
from tests.support.run_inputs import recipe_of, small_values

TRUTHS = ("2", "3", "4")


def sample(index: int, number: int, answer: str, **more: Any) -> Generation:
    prompt = verl_row(f"{index} + 2 =", "")["prompt"]
    fixed: dict[str, Any] = {"data_source": "", "num_tokens": 1, "finish_reason": "stop", "settings": "s"}
    scored = {"reward": 0.0, "correct": False, "breakdown": {}, "unscored": ""}
    return Generation(index, number, prompt=prompt, answer=answer, **{**fixed, **scored, **more})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has evaluated two versions on the set `held_out`, two answers to each of three prompts."""
    file = write_lines(tmp_path / "held_out.jsonl", [verl_row(f"{n} + 2 =", TRUTHS[n]) for n in range(3)])
    folder = tmp_path / "run"
    one = {"file": str(file), "samples_per_prompt": 2}
    recipe = recipe_of(small_values(tmp_path), run={"folder": str(folder)}, eval={"sets": [one]})
    folder.mkdir()
    (folder / "config.json").write_text(dump_recipe(recipe))
    for version, answer in ((0, "{truth}"), (10, "so {truth}.0")):
        rows = [sample(n, k, answer.format(truth=TRUTHS[n]) if k else "no") for n in range(3) for k in range(2)]
        path = folder / "evaluations" / f"{version:06d}" / "held_out.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return folder


def results(run: Path, scorer: str) -> dict[int, dict[str, Any]]:
    """The results of the set by version."""
    lines = JsonLines(run / "rescored" / scorer / "evaluations.jsonl").read()
    assert len({line["version"] for line in lines}) == len(lines)
    return {line["version"]: line["sets"]["held_out"] for line in lines}


def test_samples_of_every_version_get_the_scores_of_another_scorer(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {file: file.read_bytes() for file in run.rglob("*.json*")}
    assert score_stored_samples(run, "exact", ()) == 0
    assert {version: one["accuracy"] for version, one in results(run, "exact").items()} == {0: 0.5, 10: 0.0}
    assert results(run, "exact")[0]["metrics"]["pass@2"] == 1.0
    rescored = read_generations(run / "rescored" / "exact" / "000000" / "held_out.jsonl")
    assert [row.correct for row in rescored] == [False, True] * 3
    assert "3 of 6 samples are right with one of the scorers and wrong with the other" in capsys.readouterr().out
    assert all(file.read_bytes() == content for file, content in own.items()), "the run's own files are as they were"
    file = run / "evaluations" / "000010" / "held_out.jsonl"
    assert score_stored_samples(run / "config.json", "numeric", ()) == 0
    assert score_stored_samples(file, "numeric", ("reward.scorer=numeric", "reward.arguments.tolerance=1e-9")) == 0
    assert {version: one["accuracy"] for version, one in results(run, "numeric").items()} == {0: 0.5, 10: 0.5}


def test_what_an_episode_earned_is_added_and_one_whose_environment_failed_stays_unscored(run: Path) -> None:
    played = {"earned_reward": 0.5, "stop": "terminated", "num_turns": 1, "messages": [], "info": {}}
    rows = [
        sample(0, 0, "2", episode=played, reward=0.5),
        sample(0, 1, "9", episode=played, reward=0.5),
        sample(1, 0, "", episode={"error": "gone"}, reward=None, unscored="environment"),
    ]
    file = run / "evaluations" / "000010" / "held_out.jsonl"
    file.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    assert score_stored_samples(file, "exact", ("eval.min_scored=0.5",)) == 0
    found = read_generations(run / "rescored" / "exact" / "000010" / "held_out.jsonl")
    assert [row.reward for row in found] == [1.5, 0.5, None]
    assert results(run, "exact")[10]["unscored"] == {"environment": 1}
    assert score_stored_samples(file, "exact", ("eval.min_scored=0.9",)) == 1, "too few have a score"


def test_bad_input_is_one_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run/nothing has no stored samples of evaluations; name a run folder"):
        score_stored_samples(run / "nothing", "exact", ())
    with pytest.raises(ScorerError, match="did you mean exact"):
        score_stored_samples(run, "exakt", ())
    with pytest.raises(ConfigError, match=r"the recipe has no evaluation set held_out; it has none"):
        score_stored_samples(run, "exact", ("eval.sets=[]",))
    write_lines(tmp_path / "held_out.jsonl", [verl_row("another prompt", "2")])
    with pytest.raises(DataError, match=r"held_out.jsonl: row 0 is not the prompt of the stored samples; put back"):
        score_stored_samples(run, "exact", ())
    assert not (run / "rescored").exists()
