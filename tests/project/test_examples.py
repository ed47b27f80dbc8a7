"""The files in examples/: every recipe loads, and GSM8K's data path works on a stand-in for the file and the model."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples import gsm8k_components
from examples.gsm8k_reward import compute_score
from tandem.protos.contracts import Scored, ScoreItem
from tandem.reward.config import RewardConfig
from tandem.reward.scoring import ScoringCore
from tandem.services.commands.demo_tasks import TASKS
from tandem.services.config import load_recipe
from tandem.services.config.recipe import read_values
from tandem.services.data.dataset import load_prompts
from tandem.services.data.tiny_model import build_tiny_model
from tandem.trainer.estimators.options import estimator_models
from tandem.trainer.policy_losses.options import loss_models
from tests.support.paths import ROOT
from tests.support.processes import run_python

RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))
BASED_RECIPES = [file for file in RECIPES if file.stem not in TASKS]

SECTIONS = ["run", "model", "data", "rollout", "environment", "reward"]
SECTIONS += ["trainer", "trainer.advantage", "trainer.loss"]
MORE_SECTIONS = ["trainer.kl.reward", "trainer.kl.loss", "trainer.critic", "trainer.lora", "trainer.selection"]
MORE_SECTIONS += ["trainer.selection.overlong_penalty"]
WITHOUT_CLIP = ("reinforce", "sapo", "dro", "kl_cov")
"""Losses that clip nothing."""
ALGORITHM_KEYS = {
    "": {"base"},
    "run": {"run_id", "groups_per_batch"},
    "rollout": {"samples_per_prompt", "max_groups_in_flight"},
    "trainer": {"learning_rate", "schedule", "warmup_batches", "adam_betas", "gradient_clip", "aggregation"}
    | {"correction", "optimizer_steps_per_batch"},
    "trainer.selection": {"drop_zero_variance"},
}
"""Beside advantage and loss, the keys that a recipe with another algorithm alone may have, by section."""


def write_gsm8k(folder: Path) -> None:
    """Writes six rows per split in GSM8K's published format, one of them without an answer."""
    folder.mkdir()
    for split in ("train", "test"):
        answers = [f"{n}+1000=<<{n}+1000={n + 1000}>>\n#### {n + 1000:,}" for n in range(5)]
        question = "Ann has {} pens and buys 1,000 more. How many?"
        rows = [{"question": question.format(n), "answer": answer} for n, answer in enumerate(answers)]
        rows.append({"question": "What?", "answer": "nobody knows"})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return run_python(ROOT / "examples" / "prepare_gsm8k.py", source, output)


def head(file: Path) -> str:
    """The comment at the top of a recipe."""
    return file.read_text().partition("\n\n")[0]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_loads(file: Path) -> None:
    assert load_recipe(file).run.total_batches > 0
    assert all(line.startswith("#") for line in head(file).splitlines())
    assert re.search(r"\barXiv:\d{4}\.\d{5}\b", head(file)), "a recipe names the paper it is from"


@pytest.mark.parametrize("file", BASED_RECIPES, ids=lambda file: file.stem)
def test_the_recipes_of_gsm8k_toml_are_laid_out_alike(file: Path) -> None:
    recipe = load_recipe(file)
    assert recipe.run.run_id == file.stem
    assert f"tandem run examples/recipes/{file.name}" in head(file)
    sections = re.findall(r"^\[(.+)\]$", file.read_text(), re.MULTILINE)
    assert sections == [one for one in [*SECTIONS, *MORE_SECTIONS, "weights"] if one in sections]
    assert {"run", "trainer.advantage", "trainer.loss"} <= set(sections)
    keys = read_values(file)["trainer"].keys()
    assert {"learning_rate", "optimizer_steps_per_batch", "aggregation", "correction", "advantage", "loss"} <= keys
    scorer, is_function, _ = recipe.reward.scorer.partition(":")
    assert not is_function or (ROOT / scorer).is_file()
    assert recipe.rollout.max_groups_in_flight == recipe.run.groups_per_batch


@pytest.mark.parametrize("file", BASED_RECIPES, ids=lambda file: file.stem)
def test_a_recipe_repeats_nothing_of_gsm8k_toml(file: Path) -> None:
    own, base = (tomllib.loads(one.read_text()) for one in (file, ROOT / "examples/recipes/gsm8k.toml"))
    if file.stem == "gsm8k":
        assert "base" not in own
        return
    assert own.pop("base") == "gsm8k.toml"
    for algorithm in ("advantage", "loss"):  # a recipe always names its algorithm, even its base's
        own["trainer"].pop(algorithm)
    repeated = [f"{path}.{key}" for path, key, value in keys_of(own) if lookup(base, [*path.split("."), key]) == value]
    assert not repeated


def keys_of(table: dict[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    for key, value in table.items():
        inner = f"{path}.{key}" if path else key
        yield from keys_of(value, inner) if isinstance(value, dict) else [(path, key, value)]


def differs_in_its_algorithm_alone(file: Path) -> bool:
    """Whether a recipe is gsm8k.toml with another advantage, loss and optimizer, and other sizes of a batch. A run of
    it starts the same services for the same work.
    """
    own = tomllib.loads(file.read_text())
    return "base" in own and all(
        path in ("trainer.advantage", "trainer.loss") or key in ALGORITHM_KEYS.get(path, ())
        for path, key, _ in keys_of(own)
    )


def lookup(table: Any, path: list[str]) -> Any:
    for key in path:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def test_recipes_that_change_more_than_the_algorithm_are_told_apart() -> None:
    apart = {file.stem for file in BASED_RECIPES if not differs_in_its_algorithm_alone(file)}
    assert apart >= {"gsm8k", "grpo", "cispo", "dapo", "gdpo", "lora", "ppo", "remax", "rloo", "search", "turn_grpo"}
    assert apart >= {"opo", "m2po"}, "they have another run.staleness_budget"
    assert apart.isdisjoint({"gspo", "dro", "gpg", "pkpo"})


def test_every_algorithm_has_a_recipe() -> None:
    trainers = [load_recipe(file).trainer for file in RECIPES]
    assert {trainer.advantage.name for trainer in trainers} == set(estimator_models())
    assert {trainer.loss.name for trainer in trainers} == set(loss_models())
    assert any(trainer.lora is not None for trainer in trainers)
    assert any(trainer.needs_critic for trainer in trainers)
    assert any(trainer.kl.loss is not None for trainer in trainers)
    assert any(trainer.kl.reward is not None for trainer in trainers)
    assert any(trainer.selection.drop_zero_variance for trainer in trainers)


def test_gsm8k_rows_become_prompts_and_answers_are_scored(tmp_path: Path) -> None:
    write_gsm8k(tmp_path / "raw")
    done = prepare(tmp_path / "raw", tmp_path / "data")
    assert done.returncode == 0, done.stderr
    assert "5 rows, 1 without an answer skipped" in done.stdout
    model = build_tiny_model(tmp_path / "model")
    recipe = load_recipe(ROOT / "examples/recipes/gsm8k.toml", [f"model.path={model}"])
    prompts, faults = load_prompts(tmp_path / "data" / "train.parquet", recipe)
    assert [prompt.ground_truth for prompt in prompts] == ["1000", "1001", "1002", "1003", "1004"] and not faults
    prompt = prompts[3]
    items = [
        ScoreItem(prompt.data_source, text, prompt.ground_truth, prompt.extra_info)
        for text in ("so #### 1,003.", "#### 7", "1003")
    ]
    assert scores("gsm8k", items) == [Scored(1.0), Scored(0.0), Scored(0.0)]
    assert scores("dapo", items) == [Scored(1.0), Scored(-1.0), Scored(-1.0)]
    assert scores("gdpo", items) == [
        Scored(1.0, {"right": 1.0, "format": 0.0}),
        Scored(0.0, {"right": 0.0, "format": 1.0}),
        Scored(0.0, {"right": 0.0, "format": 0.0}),
    ]


def scores(recipe: str, items: list[ScoreItem]) -> list[Any]:
    """The scores that a recipe's scorer gives to these answers."""
    reward = load_recipe(ROOT / f"examples/recipes/{recipe}.toml").reward
    core = ScoringCore(RewardConfig(scorer=str(ROOT / reward.scorer), arguments=reward.arguments))
    try:
        return list(core.score(core.default, items, "calls"))
    finally:
        core.close()


def test_a_folder_without_gsm8k_is_an_error_naming_it(tmp_path: Path) -> None:
    done = prepare(tmp_path, tmp_path / "out")
    assert done.returncode == 2 and str(tmp_path) in done.stderr


def test_the_gsm8k_rule_reads_the_last_answer_near_the_end() -> None:
    assert compute_score("gsm8k", "#### 1\n#### -2", "-2") == 1.0
    assert compute_score("gsm8k", "#### 5" + " " * 300, "5") == 0.0


@pytest.mark.parametrize(
    ("solution", "right", "form"),
    [
        ("3 + 4 = 7\n#### 7", 1.0, 1.0),
        ("#### 7\n", 1.0, 1.0),
        ("it is #### 7", 1.0, 0.0),
        ("#### 7 pens", 1.0, 0.0),
        ("#### 8", 0.0, 1.0),
        ("#### -1,000.5", 0.0, 1.0),
        ("####", 0.0, 0.0),
        ("#### .", 0.0, 0.0),
        ("7", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("#### 7" + " " * 300, 0.0, 0.0),
        (" " * 300 + "\n#### 7", 1.0, 1.0),
    ],
)
def test_the_components_of_the_gsm8k_reward(solution: str, right: float, form: float) -> None:
    found = gsm8k_components.compute_score("gsm8k", solution, "7")
    assert found == {"score": right, "right": right, "format": form}
    assert compute_score("gsm8k", solution, "7") == right
