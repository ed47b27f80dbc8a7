"""Unknown names of `environment.tool_format`, which are refused before anything of vLLM is loaded."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.protos.errors import ConfigError
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.services.run import tool_formats
from tandem.services.run.environment_checks import check_environment
from tandem.services.run.tool_formats import check_tool_format, vllm_parsers
from tests.support.run_inputs import recipe_of, small_values


def with_format(name: str) -> EnvironmentConfig:
    return EnvironmentConfig(path="a:B", tool_format=name)


@pytest.mark.parametrize("name", ["hermez", "", "vllm:", "vllm:kimi k2", "hermes\n"])
def test_an_unknown_format_is_refused_in_one_line_with_the_known_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe_of(small_values(tmp_path), environment={"path": "a:B", "tool_format": name})
    known = "auto, hermes, qwen3_coder, llama3_json, pythonic, or vllm:NAME with the name of one of vLLM's parsers"
    assert f"environment.tool_format: {name!r} is not known; it is {known}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_names_are_those_that_vllm_itself_knows_and_read_without_it() -> None:
    program = (
        "import sys; from tandem.services.run.tool_formats import vllm_parsers; names = vllm_parsers(); "
        "print(sum(one in sys.modules for one in ('vllm', 'torch'))); "
        "from vllm.tool_parsers import ToolParserManager; print(names ^ {*ToolParserManager.lazy_parsers})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-2:] == ["0", "frozenset()"]


def test_an_unknown_parser_is_refused_before_a_run_starts_with_all_that_there_are(tmp_path: Path) -> None:
    check_tool_format(with_format("vllm:kimi_k2"))
    check_tool_format(with_format("hermes"))
    environment = {"tools": ["tests.support.tools:add"], "tool_format": "vllm:kimi"}
    with pytest.raises(ConfigError) as refused:
        check_environment(recipe_of(small_values(tmp_path), environment=environment))
    told = str(refused.value)
    assert told.startswith('environment.tool_format "vllm:kimi": vLLM has no such parser; it has apertus, ')
    assert "kimi_k2" in told and "\n" not in told


@pytest.mark.parametrize("case", ["not installed", "other sources", "a plugin"])
def test_where_the_names_are_not_known_the_sampler_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    assert vllm_parsers()
    if case == "not installed":
        monkeypatch.setattr(tool_formats.importlib.util, "find_spec", lambda _: None)
    elif case == "other sources":
        spec = find_spec("vllm")
        assert spec is not None
        monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)])
        monkeypatch.setattr(tool_formats.importlib.util, "find_spec", lambda _: spec)
    else:
        plugin = EntryPoint("mine", "my_parsers:register", "vllm.general_plugins")
        monkeypatch.setattr(tool_formats, "entry_points", lambda **_: [plugin])
    assert vllm_parsers() == frozenset()
    check_tool_format(with_format("vllm:kimi"))
