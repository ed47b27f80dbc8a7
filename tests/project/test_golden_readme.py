"""tests/golden/README.md describes every file and every family of cases."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.golden_cases import golden_cases
from tests.support.paths import ROOT
from tests.trainer.policy_losses.test_policy_losses import FAMILIES as LOSSES
from tests.trainer.test_kl import ESTIMATORS

FOLDER = ROOT / "tests" / "golden"
TEXT = (FOLDER / "README.md").read_text()
FAMILIES = set(re.findall(r"^### 3\.\d+ `(\w+)`", TEXT, re.MULTILINE))
PATTERN = "<family>_seed<N>.safetensors"


def test_the_readme_names_exactly_the_existing_files() -> None:
    named = set(re.findall(r"`([^` ]+\.(?:json|safetensors|py))`", TEXT))
    assert PATTERN in named
    of_families = {PATTERN.replace("<family>", family).replace("<N>", str(n)) for family in FAMILIES for n in range(3)}
    there = {file.name for file in FOLDER.iterdir()} - {"README.md"}
    assert there <= named | of_families
    for name in named - {PATTERN}:
        assert (ROOT / name if "/" in name else FOLDER / name).is_file(), name


def test_every_family_has_its_formulas() -> None:
    assert {case.name.partition("/")[0] for case in golden_cases("")} | {"scorer"} == FAMILIES


def test_every_case_is_compared_by_some_test() -> None:
    """A case counts as compared if its prefix is named by a test or built from the test's own names."""
    texts = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__)]
    asked = {prefix for text in texts for prefix in re.findall(r'golden_cases\("([^"]+)"\)', text)}
    asked |= {f"policy_loss/{family}/" for family in LOSSES} | {case.name for case in ESTIMATORS}
    assert [case.name for case in golden_cases("") if not case.name.startswith(tuple(asked))] == []


def test_the_readme_explains_peculiar_cases() -> None:
    assert "\n- `peculiar`: " in TEXT and any(case.peculiar for case in golden_cases(""))
