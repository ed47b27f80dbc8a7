"""The package in docs/plugins.md, built and installed, and entry points that cannot be used."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.wheels import build_wheel, install

PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")

LEARNING = """
import sys
from tandem.services.config import load_recipe
trainer = load_recipe("recipe.toml").trainer
assert "torch" not in sys.modules and "my_plugins.learning" not in sys.modules

import torch
from tandem import EstimatorBatch, LossTokens
from tandem.trainer.estimators.registry import estimate
from tandem.trainer.policy_losses.registry import policy_loss

scores = EstimatorBatch(
    rewards_N=torch.tensor([0.0, 3.0, 1.0], dtype=torch.float64),
    lengths_R=torch.tensor([2, 1]),
    groups_R=torch.tensor([0, 0]),
)
advantages_N = estimate(scores, trainer.advantage).advantages_N
zeros_N = torch.zeros(3, dtype=torch.float64)
current_N = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
tokens = LossTokens(current_N, zeros_N, zeros_N, advantages_N, zeros_N + 1.0, scores.lengths_R)
terms = policy_loss(tokens, trainer.loss)
print(advantages_N.tolist())
print([round(loss, 4) for loss in terms.losses_N.tolist()], terms.marks["clipped"].tolist())
"""

SCORING = """
from tandem import ScoreItem
from tandem.reward.registry import describe, make_judge, make_spec

(info,) = [one for one in describe() if one.name == "word_limit"]
print(info.parameters)
spec = make_spec("word_limit", {"max_words": 2})
print(spec.version, spec.isolation, [spec.build().judge(ScoreItem("", text, None)).value for text in ("a b", "a b c")])
make_spec("word_limit", {"max_word": 2})
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that contains the page's package."""
    folder = tmp_path_factory.mktemp("plugins")
    project = folder / "project"
    (project / "my_plugins").mkdir(parents=True)
    (project / "my_plugins" / "__init__.py").touch()
    files = re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", PAGE, re.M | re.S)
    assert len(files) == 4
    for name, text in files:
        (project / name).write_text(text, encoding="utf-8")
    return install(build_wheel(project, folder), folder / "installed")


def python(path: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(*arguments, cwd=folder, PYTHONPATH=str(path))


def write_recipe(folder: Path, more: str) -> None:
    (folder / "recipe.toml").write_text(f'base = "{ROOT}/examples/recipes/gsm8k.toml"\n{more}')


def test_a_recipe_trains_with_the_loss_and_the_advantage_of_the_page(installed: Path, tmp_path: Path) -> None:
    (recipe,) = re.findall(r"^```toml\n(\[reward\].*?)^```", PAGE, re.M | re.S)
    write_recipe(tmp_path, recipe)
    done = python(installed, tmp_path, "-c", LEARNING)
    assert done.stdout.splitlines() == ["[1.0, 1.0, -1.0]", "[-1.0, -1.5, 0.3679] [False, True, False]"], done.stderr
    shown = python(installed, tmp_path, "-m", "tandem.services.cli", "config", "recipe.toml")
    assert "cap = 1.5" in shown.stdout and "scale = 1.0" in shown.stdout, shown.stderr


def test_the_scorer_of_the_page_is_listed_checked_and_scores(installed: Path, tmp_path: Path) -> None:
    done = python(installed, tmp_path, "-c", SCORING)
    listed, scored = done.stdout.splitlines()
    assert "name='max_words', type='integer', default='100', description='Longest answer that scores.'" in listed
    assert scored == "1 in_process [1.0, 0.0]"
    assert "unknown key reward.arguments.max_word; did you mean reward.arguments.max_words?" in done.stderr


def add_entry_point(folder: Path, group: str, name: str, value: str) -> Path:
    """Adds an installed package that has only this entry point."""
    info = folder / "clash-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: clash\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return folder


@pytest.mark.parametrize(
    ("group", "name", "value", "said"),
    [
        ("tandem.scorers", "gsm8k", "json:loads", "of clash 1.0 has the name of a built-in one; choose another name"),
        ("tandem.scorers", "mine", "json:JSONDecoder", "JSONDecoder is not a class derived from Scorer"),
        ("tandem.losses", "gspo", "json:loads", "of clash 1.0 has the name of a built-in one; choose another name"),
        ("tandem.advantages", "grpo", "json:loads", "of clash 1.0 has the name of a built-in one; choose another name"),
        ("tandem.losses", "mine", "surely_not.there:A", "of clash 1.0 does not import: ModuleNotFoundError: No module"),
        ("tandem.losses", "mine", "json:nothing", "of clash 1.0 does not import: AttributeError: module 'json' has no"),
        ("tandem.advantages", "mine", "json:JSONDecoder", "JSONDecoder is not a class derived from EstimatorOptions"),
        ("tandem.losses", "mine", "tandem.trainer.policy_losses.options:GspoOptions", "GspoOptions must be 'mine'"),
    ],
)
def test_an_unusable_entry_point_is_a_one_line_error_naming_its_package(
    tmp_path: Path, group: str, name: str, value: str, said: str
) -> None:
    write_recipe(tmp_path, "")
    path = add_entry_point(tmp_path, group, name, value)
    command = ["config", "recipe.toml"]
    if group == "tandem.scorers":
        command = ["reward", "serve", "--port", "0", f"reward.scorer={name}"]
    done = python(path, tmp_path, "-m", "tandem.services.cli", *command)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"tandem: entry point {group}: {name}")
    assert said in line
