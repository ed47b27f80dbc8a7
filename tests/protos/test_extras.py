"""The error for a missing package names the pip command that installs it."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tandem.protos.errors import EnvironmentLackError
from tandem.protos.extras import _COMMANDS, missing_extra_named, require_installed
from tandem.reward.scorers.reward_model import RewardModel
from tests.support.paths import ROOT

NEVER_IMPORTED = {"hiredis", "tandem-rl"}
"""redis-py imports hiredis by itself."""
EXTRAS = ("reward", "train", "dashboard", "ray", "trackers", "mcp", "cpu")
"""Not `tracing`: `opentelemetry` is a namespace of many distributions."""


def test_every_package_of_an_extra_has_its_pip_command() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {canonicalize_name(Requirement(text).name) for extra in EXTRAS for text in extras[extra]}
    imported_as = {
        canonicalize_name(distribution): name
        for name, distributions in packages_distributions().items()
        for distribution in distributions
        if name in _COMMANDS and name != "opentelemetry"
    }
    assert set(imported_as) == wanted - NEVER_IMPORTED


@pytest.mark.parametrize(("module", "extra"), [("vllm.v1", "cpu"), ("typer", "reward")])
def test_a_missing_module_of_an_extra_becomes_an_error_with_the_pip_command(module: str, extra: str) -> None:
    said = rf"{module.partition('.')[0]} is not installed; install it: pip install 'tandem-rl\[{extra}\]'"
    with pytest.raises(EnvironmentLackError, match=said), missing_extra_named():
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def test_a_missing_module_outside_extras_stays_a_module_not_found_error() -> None:
    with pytest.raises(ModuleNotFoundError), missing_extra_named():
        raise ModuleNotFoundError("No module named 'tandem.nowhere'", name="tandem.nowhere")


def test_installed_packages_are_not_imported() -> None:
    require_installed("typer", "this")
    assert "this" not in sys.modules


def test_a_reward_model_without_torch_names_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").touch()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    with pytest.raises(EnvironmentLackError, match=r"torch is not installed; .*'tandem-rl\[cpu\]'"):
        RewardModel(path=str(tmp_path)).start()
