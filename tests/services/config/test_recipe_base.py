"""A recipe may name another as its base and then contain only the differences."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.config import load_recipe
from tandem.services.config.docs import as_toml

BASE = """
[run]
run_id = "base"
total_batches = 7
[model]
path = "m"
[data]
train_file = "d.parquet"
[trainer]
correction = "areal"
[trainer.loss]
name = "clipped_surrogate"
clip_high = 0.28
[reward]
arguments = { a = 1 }
"""


def write(folder: Path, **texts: str) -> Path:
    """Writes `<name>.toml` for each text; returns the last file."""
    for name, text in texts.items():
        file = folder / f"{name}.toml"
        file.write_text(text)
    return file


def test_keys_of_the_recipe_win_over_those_of_its_bases(tmp_path: Path) -> None:
    middle = 'base = "base.toml"\n[run]\nrun_id = "middle"\nseed = 3\n'
    own = 'base = "middle.toml"\n[run]\nrun_id = "own"\n[reward]\narguments = { b = 2 }\n'
    recipe = load_recipe(write(tmp_path, base=BASE, middle=middle, own=own))
    assert (recipe.run.run_id, recipe.run.seed, recipe.run.total_batches) == ("own", 3, 7)
    assert recipe.run.folder == "runs/own"
    assert recipe.reward.arguments == {"b": 2}, "a free table is replaced as a whole"


def test_the_base_is_found_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    own = write(tmp_path / "inner", own='base = "../base.toml"\n[run]\nrun_id = "own"\n')
    write(tmp_path, base=BASE)
    monkeypatch.chdir("/")
    assert load_recipe(own).run.total_batches == 7


def test_a_table_with_another_name_starts_from_its_own_defaults(tmp_path: Path) -> None:
    same = load_recipe(write(tmp_path, base=BASE, own='base = "base.toml"\n[trainer.loss]\nclip_low = 0.1\n'))
    assert same.trainer.loss.model_dump()["clip_high"] == 0.28
    other = load_recipe(write(tmp_path, own='base = "base.toml"\n[trainer.loss]\nname = "gspo"\n'))
    assert other.trainer.loss.model_dump()["clip_high"] != 0.28
    table = load_recipe(write(tmp_path, own='base = "base.toml"\n[trainer.correction]\nveto = 0.5\n'))
    assert table.trainer.correction.model_dump()["preset"] == "areal"


def test_overrides_win_over_all_bases_and_config_prints_the_result(tmp_path: Path) -> None:
    own = write(tmp_path, base=BASE, own='base = "base.toml"\n[run]\nseed = 3\n')
    recipe = load_recipe(own, ["run.total_batches=9"])
    assert recipe.run.total_batches == 9
    whole = tomllib.loads(as_toml(recipe))
    assert "base" not in whole and whole["run"]["seed"] == 3 and whole["trainer"]["loss"]["clip_high"] == 0.28


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({"own": 'base = "gone.toml"'}, ["gone.toml", "(base of ", "own.toml)", "no such file"]),
        ({"own": "base = 3"}, ["own.toml: base: should be the path"]),
        ({"own": 'base = "own.toml"'}, ["own.toml", "form a cycle (own.toml -> own.toml)"]),
        (
            {"a": 'base = "own.toml"', "own": 'base = "a.toml"'},
            ["own.toml: its bases form a cycle (own.toml -> a.toml -> own.toml)"],
        ),
        ({"base": BASE, "own": 'base = "base.toml"\n[run]\nsed = 1'}, ["own.toml", "unknown key run.sed"]),
    ],
    ids=["missing", "no path", "itself", "cycle", "unknown key"],
)
def test_a_wrong_base_is_a_one_line_error(tmp_path: Path, texts: dict[str, str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_recipe(write(tmp_path, **texts))
    assert all(words in str(error.value) for words in says), error.value
