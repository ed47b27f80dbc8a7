"""The shipped recipes run: the demo as a user sees it, the GSM8K recipes on a stand-in for their model and file. Those
that differ from gsm8k.toml in their algorithm alone are trained by tests/trainer/test_recipes.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from safetensors.torch import load_file

from tandem.services.config import Recipe, load_recipe
from tandem.services.data.arithmetic import EVALUATION_ROWS
from tandem.services.data.tiny_model import build_tiny_model
from tests.project.test_examples import (
    BASED_RECIPES,
    WITHOUT_CLIP,
    differs_in_its_algorithm_alone,
    prepare,
    write_gsm8k,
)
from tests.support.paths import ROOT
from tests.support.processes import run_python, run_tandem
from tests.support.tiny_model import TOOL_TEMPLATE

pytestmark = pytest.mark.system

WHOLE_RUNS = [file for file in BASED_RECIPES if not differs_in_its_algorithm_alone(file)]
SAMPLED_BY_VLLM = ("gsm8k", "dapo", "lora", "remax")
"""Recipes that ask something of their own of a sampler, and the one that the others derive from. The samplers of the
others are of the engine that starts in half the time.
"""
FIGURES: dict[str, Callable[[Recipe], bool]] = {
    "reward_kl": lambda recipe: recipe.trainer.kl.reward is not None,
    "reference_kl": lambda recipe: recipe.trainer.kl.loss is not None,
    "value_loss": lambda recipe: recipe.trainer.needs_critic,
    "baseline_reward_mean": lambda recipe: recipe.trainer.needs_baselines,
    "clipped_fraction": lambda recipe: recipe.trainer.loss.name not in WITHOUT_CLIP,
}
"""Figures of a batch that trains the policy, and the recipes that have them; other recipes must not."""


def summary(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "summary.json").read_text()))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "changes"), [(0, ()), (1, ("run.total_batches=50",))], ids=["whole", "another seed"])
def test_the_demo_learns_and_its_control_run_does_not(tmp_path: Path, seed: int, changes: tuple[str, ...]) -> None:
    done = run_tandem("demo", "--seed", str(seed), *changes, cwd=tmp_path, seconds=700)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "demo"
    figures = summary(run)
    print(json.dumps(figures, indent=1))
    assert "runs/demo/report.html" in done.stdout
    assert "Importance weights" in (run / "report.html").read_text(encoding="utf-8")
    assert figures["initial_accuracy"] <= 0.55 and figures["final_accuracy"] >= 0.85
    assert figures["train_steps"] == figures["weight_updates"] == figures["total_batches"]
    assert figures["groups"]["committed"] == figures["total_batches"] * figures["groups_per_batch"]
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert all(e["num_rows"] == e["num_scored"] == EVALUATION_ROWS for e in evaluations)
    with pa.ipc.open_file(run / "batches" / "000001" / "groups.arrow") as reader:
        assert reader.read_all().num_rows == 32 * 8
    assert list((run / "tensorboard").iterdir())
    if seed == 0:
        check_the_exported_model(tmp_path, figures["final_accuracy"])
        return

    recipe = str(ROOT / "examples" / "recipes" / "arithmetic.toml")
    still = ["run.run_id=control", "run.folder=runs/control", "run.total_batches=10", "trainer.learning_rate=0"]
    control = run_tandem("run", recipe, *still, f"run.seed={seed}", cwd=tmp_path, seconds=200)
    assert control.returncode == 0, control.stdout[-3000:] + control.stderr[-3000:]
    figures = summary(tmp_path / "runs" / "control")
    assert abs(figures["final_accuracy"] - figures["initial_accuracy"]) <= 0.03


@pytest.mark.timeout(900)
def test_the_agents_demo_learns_to_read_what_its_environment_answers(tmp_path: Path) -> None:
    """A policy that does not read wins 4 of 15 games on average, whatever it guesses."""
    changes = ("run.total_batches=90", "trainer.schedule=constant", "trainer.evaluate_every=90")
    done = run_tandem("demo", "--task", "guess_number", *changes, cwd=tmp_path, seconds=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = summary(tmp_path / "runs" / "demo-agent")
    print(json.dumps(figures, indent=1))
    assert figures["final_accuracy"] >= max(0.4, figures["initial_accuracy"] + 0.1)
    assert figures["groups"]["committed"] == 90 * 32


def check_the_exported_model(folder: Path, final_accuracy: float) -> None:
    """`tandem eval` finds the run's last accuracy with the exported model, and keeps the samples, which it does not
    sample again, and which another scorer may judge.
    """
    run, output = folder / "runs" / "demo", folder / "evaluated"
    command = ("eval", str(run / "config.json"), f"model.path={run / 'hf'}", "--output", str(output))
    done = run_tandem(*command, cwd=folder, seconds=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    file = output / "evaluations" / "000000" / "eval.jsonl"
    samples = file.read_bytes()
    assert samples.count(b"\n") == EVALUATION_ROWS
    again = run_tandem(*command, cwd=folder, seconds=200)
    assert again.returncode == 0 and file.read_bytes() == samples, again.stdout[-3000:] + again.stderr[-3000:]
    (line,) = (output / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line)["num_scored"] == EVALUATION_ROWS
    rescored = run_tandem("eval", str(output), "--rescore", "exact", cwd=folder, seconds=100)
    assert rescored.returncode == 0, rescored.stdout[-3000:] + rescored.stderr[-3000:]
    assert f"0 of {EVALUATION_ROWS} samples are right with one of the scorers" in rescored.stdout
    said = re.search(r"accuracy ([0-9.]+), mean reward ([0-9.]+) over (\d+) rows", done.stdout)
    assert said is not None, done.stdout
    # Greedy answers of the same weights; in another batch of rows, a tie may be decided the other way.
    assert abs(float(said[1]) - final_accuracy) <= 0.005 and int(said[3]) == EVALUATION_ROWS
    assert final_accuracy > 0.5, "else the model before the run would do as well"
    assert f"{run / 'hf'} on " in done.stdout and "not scored" not in done.stdout


def stand_in(recipe: Recipe) -> list[str]:
    """Overrides with which a GSM8K recipe takes seconds on the tiny model, which never answers right."""
    trainer, answers = recipe.trainer, min(recipe.rollout.samples_per_prompt, 4)
    small = [
        "model.path=model",
        "run.total_batches=2",
        f"run.groups_per_batch={8 // answers}",
        f"rollout.samples_per_prompt={answers}",
        "rollout.max_response_tokens=32",
        "rollout.max_groups_in_flight=8",
        f"rollout.kv_cache_bytes={64 << 20}",
        "trainer.dtype=float32",
        f"trainer.optimizer_steps_per_batch={min(trainer.optimizer_steps_per_batch, 2)}",
        "weights.backend=gloo",
        f'rollout.engine="{"vllm" if recipe.run.run_id in SAMPLED_BY_VLLM else "transformers"}"',
    ]
    if trainer.selection.overlong_penalty is not None:
        small.append("trainer.selection.overlong_penalty.buffer_tokens=8")
    if recipe.environment.tools:
        tools = json.dumps([f"{ROOT}/{tool}" if ":" in tool else tool for tool in recipe.environment.tools])
        small += [f"environment.tools={tools}", "model.chat_template=tools.jinja", "data.max_prompt_tokens=900"]
    if trainer.needs_critic:
        small.append("trainer.critic.warmup_batches=1")
    if recipe.run.run_id == "gsm8k":  # runs as shipped, with its own reward, evaluations and TensorBoard
        scorer = f"{ROOT}/{recipe.reward.scorer}"
        return [*small, f'reward.scorer="{scorer}"', "trainer.selection.drop_zero_variance=false"]
    function = "components" if trainer.needs_components else "compute_score"
    scorer = f"{ROOT}/tests/support/scorers.py:{function}"
    return [*small, f'reward.scorer="{scorer}"', "data.eval_file="]


@pytest.fixture(scope="module")
def gsm8k_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gsm8k")
    write_gsm8k(folder / "raw")
    assert prepare(folder / "raw", folder / "data" / "gsm8k").returncode == 0
    assert run_python(ROOT / "examples" / "prepare_search.py", folder / "data" / "search").returncode == 0
    build_tiny_model(folder / "model")
    (folder / "tools.jinja").write_text(TOOL_TEMPLATE)
    return folder


@pytest.mark.timeout(200)
@pytest.mark.parametrize("file", WHOLE_RUNS, ids=lambda file: file.stem)
def test_a_recipe_of_gsm8k_toml_takes_two_steps(file: Path, gsm8k_folder: Path) -> None:
    done = run_tandem("run", str(file), *stand_in(load_recipe(file)), cwd=gsm8k_folder, seconds=150)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run, recipe = gsm8k_folder / "runs" / file.stem, load_recipe(file)
    assert summary(run)["train_steps"] == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert math.isfinite(line["loss"]) and line["skipped_steps"] == 0
        assert line["staleness_max"] <= recipe.run.staleness_budget
    assert {name: name in lines[1] for name in FIGURES} == {name: there(recipe) for name, there in FIGURES.items()}
    check_what_is_special(file.stem, lines, run)


def check_what_is_special(name: str, lines: list[dict[str, Any]], run: Path) -> None:
    """Checks the effects that only this recipe has."""
    first, last = lines
    if name == "gsm8k":
        assert last["reward_mean"] == 0.0 and last["zero_variance_groups"] == last["num_groups"]
        assert len((run / "evaluations.jsonl").read_text().splitlines()) == 2
        return
    assert last["grad_norm"] > 0 and last["advantage_abs_mean"] > 0 and last["trained_tokens"] > 0
    assert first["weights_digest"] != last["weights_digest"]
    if name in ("dapo", "topr"):
        assert last["reward_mean"] < 0, "a wrong answer costs 1"
    if name == "ppo":
        assert first["trained_tokens"] == 0 and first["value_loss"] > 0, "the critic warms up alone"
    if name == "lora":
        adapters = load_file(run / "hf-adapter" / "adapter_model.safetensors")
        assert last["weight_bytes"] == sum(tensor.nbytes for tensor in adapters.values()), "they travel alone"
