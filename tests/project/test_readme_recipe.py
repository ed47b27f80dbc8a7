"""README's recipe for a user's own model and data is complete: a run of it passes every check."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.services.config import load_recipe
from tandem.services.run.preflight import check_recipe
from tests.support.dataset_files import verl_row, write_parquet
from tests.support.paths import ROOT
from tests.support.run_inputs import write_model

SMALL = ["data.max_prompt_tokens=32", "rollout.max_response_tokens=32", "rollout.kv_cache_bytes=1048576"]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)
"""


def test_the_recipe_in_readme_runs_with_a_model_a_file_and_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = (ROOT / "README.md").read_text().partition("## Your own run")[2]
    block = re.search(r"```toml\n(.*?)```", section, re.DOTALL)
    assert block is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_REDIS_URL", "")
    Path("mine.toml").write_text(block[1])
    Path("my_reward.py").write_text(REWARD)
    write_parquet(Path("train.parquet"), [verl_row("1+1=", "2")])
    write_model(Path("model"))
    recipe = load_recipe("mine.toml", ["model.path=model", *SMALL])
    assert recipe.reward.scorer == "my_reward.py:compute_score"
    check_recipe(recipe, resume=False)
