"""What stands in examples/: every recipe loads, and GSM8K's data path works on a stand-in for the file and the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gsm8k_reward import compute_score
from protos.contracts import Scored, ScoreItem
from protos.nouns import SamplingParameters
from reward.config import RewardConfig
from reward.registry import build_scorer
from services.config import load_recipe
from services.dataset import load_prompts
from services.tiny_model import build_tiny_model

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.toml"))


def write_gsm8k(folder: Path) -> None:
    """Six rows a split as GSM8K publishes them, one of them without an answer."""
    folder.mkdir()
    for split in ("train", "test"):
        rows = [
            {
                "question": f"Ann has {n} pens and buys 1,000 more. How many?",
                "answer": f"{n}+1000=<<{n}+1000={n + 1000}>>\n#### {n + 1000:,}",
            }
            for n in range(5)
        ]
        rows.append({"question": "What?", "answer": "nobody knows"})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "prepare_gsm8k.py"), str(source), str(output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_loads(file: Path) -> None:
    assert load_recipe(file).run.total_batches > 0


def test_gsm8k_becomes_prompts_and_is_judged(tmp_path: Path) -> None:
    write_gsm8k(tmp_path / "raw")
    done = prepare(tmp_path / "raw", tmp_path / "data")
    assert done.returncode == 0, done.stderr
    assert "5 rows, 1 without an answer skipped" in done.stdout
    recipe = load_recipe(ROOT / "examples/recipes/gsm8k.toml")
    loaded = load_prompts(
        tmp_path / "data" / "train.parquet",
        model_path=str(build_tiny_model(tmp_path / "model")),
        chat_template="",
        max_prompt_tokens=recipe.data.max_prompt_tokens,
        num_samples=recipe.rollout.samples_per_prompt,
        sampling=SamplingParameters(),
    )
    assert len(loaded.prompts) == 5 and not loaded.faults
    assert [prompt.ground_truth for prompt in loaded.prompts] == ["1000", "1001", "1002", "1003", "1004"]
    scorer = build_scorer(RewardConfig(scorer=str(ROOT / recipe.reward.scorer)))
    try:
        prompt = loaded.prompts[3]
        items = [
            ScoreItem(prompt.data_source, text, prompt.ground_truth, prompt.extra_info)
            for text in ("so #### 1,003.", "#### 7", "1003")
        ]
        assert scorer.score(items) == [Scored(1.0), Scored(0.0), Scored(0.0)]
    finally:
        scorer.close()


def test_a_folder_without_gsm8k_is_named(tmp_path: Path) -> None:
    done = prepare(tmp_path, tmp_path / "out")
    assert done.returncode == 2 and str(tmp_path) in done.stderr


def test_the_gsm8k_rule_reads_the_last_answer_of_the_end() -> None:
    assert compute_score("gsm8k", "#### 1\n#### -2", "-2") == 1.0
    assert compute_score("gsm8k", "#### 5" + " " * 300, "5") == 0.0
