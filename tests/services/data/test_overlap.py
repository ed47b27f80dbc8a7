"""Prompts of evaluation sets that are in the training data, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.protos.errors import DataError
from tandem.services.cli import app
from tandem.services.data.overlap import num_shared, trained_prompts
from tandem.services.launchers.supervisor import OverlapReport
from tests.support.dataset_files import BAD_ROWS, verl_row, write_lines, write_parquet
from tests.support.run_inputs import recipe_of, small_values
from tests.support.waiting import eventually

SYSTEM = {"role": "system", "content": "Answer briefly."}


def test_prompts_with_the_same_messages_are_counted_in_files_of_both_formats(tmp_path: Path) -> None:
    two = [SYSTEM, {"role": "user", "content": "9 + 1 ="}]
    rows = [
        *(verl_row(f"{n} + 1 =", "9") for n in range(5)),
        verl_row("", "9", prompt=two),
        verl_row("", "9", prompt=[]),
    ]
    train = write_parquet(tmp_path / "train.parquet", rows)
    texts = [{"prompt": "7 + 1 =", "answer": "8"}, {"prompt": "8 + 1 =", "answer": "9"}]
    more = write_lines(tmp_path / "more.jsonl", [*(bad for _, bad in BAD_ROWS), *texts])
    questions = {"both": ("0 + 1 =", "7 + 1 =", "7 + 1 =", "50 + 1 ="), "none": ("0 + 1 = ",), "empty": ()}
    sets = {name: [[{"role": "user", "content": one}] for one in own] for name, own in questions.items()}
    sets["none"].append([SYSTEM, {"role": "user", "content": "0 + 1 ="}])
    sets["two"] = [two, two[1:]]
    assert num_shared(sets, [train, more]) == {"both": 3, "none": 0, "empty": 0, "two": 1}
    assert num_shared(sets, [more])["both"] == 2
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        num_shared(sets, [tmp_path / "gone.jsonl"])


def test_the_sets_of_a_recipe_are_compared_as_far_as_they_are_used(tmp_path: Path) -> None:
    values = small_values(tmp_path)
    write_lines(Path(values["data"]["train_file"]), [verl_row(f"{n} + 1 =", "9") for n in range(4)])
    file = str(write_lines(tmp_path / "aime.jsonl", [verl_row(f"{n} + 1 =", "9") for n in range(2, 8)]))
    sets = [{"file": file}, {"name": "first", "file": file, "limit": 1}]
    recipe = recipe_of(values, eval={"sets": sets})
    assert trained_prompts(recipe) == {"aime": (2, 6), "first": (1, 1)}
    assert trained_prompts(recipe_of(values)) == {}


def test_tasks_of_an_environment_are_the_same_if_their_ground_truth_and_extra_info_are(tmp_path: Path) -> None:
    """Every row has the same prompt. Where a row stands is not part of its task."""

    def task(truth: str, **extra: object) -> dict[str, object]:
        return verl_row("Guess a number.", truth, extra_info=extra)

    values = small_values(tmp_path)
    tasks = [task("1", split="train", index=0, most=15), task("2", split="train", index=1, seed=7)]
    train = write_parquet(tmp_path / "train.parquet", tasks)
    more = write_lines(tmp_path / "more.jsonl", [task("3", index=0, example_id=9), *(bad for _, bad in BAD_ROWS)])
    asked = [
        task("1", split="test", index=5, most=15),
        task("2", split="test", index=6, seed=8),
        task("3", split="test", index=7),
        task("4", split="test", index=8),
        task("1", split="test", index=9, most=16),
    ]
    files = [write_lines(tmp_path / "held.jsonl", asked), write_parquet(tmp_path / "stored.parquet", asked)]
    sets = [{"file": str(file)} for file in files]
    data = {"train": [{"path": str(train)}, {"path": str(more)}]}
    del values["data"]["train_file"]
    for environment, number in (({"path": "a:B"}, 2), ({"tools": ["a:b"]}, 5), ({}, 5)):
        recipe = recipe_of(values, data=data, eval={"sets": sets}, environment=environment)
        assert trained_prompts(recipe) == {"held": (number, 5), "stored": (number, 5)}
    alone = recipe_of(values, data={"train": [{"path": str(more)}]}, eval={"sets": sets}, environment={"path": "a:B"})
    assert trained_prompts(alone)["stored"] == (1, 5)


def test_a_run_says_once_which_sets_have_prompts_of_the_training_data(tmp_path: Path) -> None:
    values = small_values(tmp_path)
    train = values["data"]["train_file"]
    other = str(write_lines(tmp_path / "other.jsonl", [verl_row("20 + 1 =", "21")]))
    recipe = recipe_of(values, eval={"sets": [{"name": "seen", "file": train}, {"file": other}]})
    environments: list[dict[str, object]] = [{}, {"tools": ["a:b"]}, {"path": "a:B"}]
    for environment, counted in zip(environments, ("prompts", "prompts", "tasks"), strict=True):
        lines: list[str] = []
        report = OverlapReport(
            recipe_of(values, eval={"sets": recipe.eval.sets}, environment=environment), lines.append
        )

        def told(report: OverlapReport = report, lines: list[str] = lines) -> list[str]:
            report.tell()
            return lines

        eventually(told)
        report.tell()
        assert lines == [f"evaluation set seen: 4 of 4 {counted} are in the training data, too"]


def test_data_check_counts_the_rows_that_are_in_training_files(tmp_path: Path) -> None:
    train, held_out = (
        write_lines(tmp_path / f"{name}.jsonl", [verl_row(f"{n} + 1 =", "9") for n in numbers])
        for name, numbers in (("train", range(5)), ("held_out", range(3, 9)))
    )
    done = CliRunner().invoke(app, ["data", "check", str(held_out), "--training", str(train)])
    assert done.exit_code == 0, "it is no fault of a row"
    assert [line.split()[-2] for line in done.output.splitlines() if "in the training data" in line] == ["2"]
    assert "in the training data" not in CliRunner().invoke(app, ["data", "check", str(held_out)]).output
