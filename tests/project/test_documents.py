"""Every command, file and key that the documents name exists, and README's recipe for a user's own run is complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tandem.reward.options.tree import known_keys
from tandem.services.cli import app
from tandem.services.config import Recipe, load_recipe
from tandem.services.run.preflight import check_recipe
from tests.project.house import table
from tests.support.dataset_files import verl_row, write_parquet
from tests.support.golden_cases import golden_cases
from tests.support.paths import GOLDEN, ROOT
from tests.support.run_inputs import write_model
from tests.trainer.policy_losses.test_policy_losses import FAMILIES as LOSSES
from tests.trainer.test_kl import ESTIMATORS

PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        *("architecture", "algorithms", "chaos", "dashboard", "environments", "evaluation", "metrics", "plugins"),
        *("reward", "sandbox", "scaling", "security", "speed", "tools"),
    )
]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
TEXT = {file: file.read_text() for file in DOCUMENTS}
KEY = r"(?:run|model|data|rollout|environment|reward|eval|jobs|autoscale|trainer|weights|sft)(?:\.[a-z_]+)+"


def lines_of_code(text: str) -> list[str]:
    return [
        line.partition("#")[0].strip()
        for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S)
        for line in block.splitlines()
    ]


COMMANDS = sorted({line for text in TEXT.values() for line in lines_of_code(text) if line.startswith("tandem ")})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_shown_command_exists_and_its_overrides_fit(command: str) -> None:
    words = command.split()[1:]
    path = words[:2] if words[0] in ("certs", "data", "env", "reward") else words[:1]
    assert CliRunner().invoke(app, [*path, "--help"]).exit_code == 0
    overrides = [word for word in words if re.match(r"[a-z]+(\.[a-z_]+)+=", word)]
    recipes = [word for word in words if word.startswith("examples/recipes/")]
    for recipe in recipes:
        load_recipe(ROOT / recipe, overrides)
    assert all(override.partition("=")[0] in known_keys(Recipe) for override in overrides)
    options = [word for word in words if word.startswith("--")]
    assert all(option in CliRunner().invoke(app, [*path, "--help"]).output for option in options)


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) >= 8
    known = (
        "certs chaos checkpoint config dashboard data demo doctor drain env eval health ledger pause plan repair "
        "replay report resume reward run scale serve sft status stop takeover token"
    )
    assert known.split() == sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_every_file_that_is_named_exists(file: Path) -> None:
    named = re.findall(
        r"`((?:protos|rollout|reward|trainer|services|tests|docs|examples|benchmarks|deploy)/[\w./-]*)`", TEXT[file]
    )
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT[file]) if "://" not in link]
    assert all((ROOT / name).exists() for name in named), [name for name in named if not (ROOT / name).exists()]
    assert all((file.parent / link).exists() for link in links)


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_every_make_target_and_key_that_is_named_exists(file: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {
        target
        for line in [*lines_of_code(TEXT[file]), *re.findall(r"`([^`]+)`", TEXT[file])]
        if line.startswith("make ")
        for target in re.findall(r" ([a-z][a-z-]+)(?= |$)", line.partition("ARGS")[0])
    }
    assert named <= targets, named - targets
    keys = set(re.findall(rf"`({KEY})(?: = [^`]*)?`", TEXT[file]))
    assert keys <= set(known_keys(Recipe)), keys - set(known_keys(Recipe))


def test_following_one_group_opens_at_most_40_files() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    files = [row[1].strip("`") for row in table(page, "step")]
    assert 30 <= len(files) == len(set(files)) <= 40
    assert all((ROOT / file).is_file() for file in files)


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


# ---- tests/golden/README.md ----


GOLDEN_TEXT = (GOLDEN / "README.md").read_text()
FAMILIES = set(re.findall(r"^### 3\.\d+ `(\w+)`", GOLDEN_TEXT, re.MULTILINE))
PATTERN = "<family>_seed<N>.safetensors"


def test_the_readme_names_exactly_the_existing_files() -> None:
    named = set(re.findall(r"`([^` ]+\.(?:json|safetensors|py))`", GOLDEN_TEXT))
    assert PATTERN in named
    of_families = {PATTERN.replace("<family>", family).replace("<N>", str(n)) for family in FAMILIES for n in range(3)}
    there = {file.name for file in GOLDEN.iterdir()} - {"README.md"}
    assert there <= named | of_families
    for name in named - {PATTERN}:
        assert (ROOT / name if "/" in name else GOLDEN / name).is_file(), name


def test_every_family_has_its_formulas() -> None:
    assert {case.name.partition("/")[0] for case in golden_cases("")} | {"scorer"} == FAMILIES


def test_every_case_is_compared_by_some_test() -> None:
    """A case counts as compared if its prefix is named by a test or built from the test's own names."""
    texts = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__)]
    asked = {prefix for text in texts for prefix in re.findall(r'golden_cases\("([^"]+)"\)', text)}
    asked |= {f"policy_loss/{family}/" for family in LOSSES} | {case.name for case in ESTIMATORS}
    assert [case.name for case in golden_cases("") if not case.name.startswith(tuple(asked))] == []


def test_the_readme_explains_peculiar_cases() -> None:
    assert "\n- `peculiar`: " in GOLDEN_TEXT and any(case.peculiar for case in golden_cases(""))
