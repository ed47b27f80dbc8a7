"""Recipes: defaults, overrides, bases, unknown keys, numbers, one-line errors, and the generated documents."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tandem.protos.errors import ConfigError
from tandem.reward.options.tree import default_of, known_keys, shape_of, tables
from tandem.services.config import Recipe, dump_recipe, load_recipe, load_resolved, parse_recipe
from tandem.services.config.docs import PAGE, as_toml, keys, page
from tandem.services.config.overrides import apply_overrides
from tandem.services.config.recipe import ServiceConfig
from tandem.trainer.config import TrainerConfig

QUIET = settings(deadline=None, max_examples=60)  # a slow machine is no failure
MINIMAL = '[run]\nrun_id = "mine"\n[model]\npath = "models/tiny"\n[data]\ntrain_file = "train.parquet"\n'


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(MINIMAL)
    return file


def minimal(**sections: dict[str, Any]) -> dict[str, Any]:
    values = tomllib.loads(MINIMAL)
    for section, given_values in sections.items():
        values[section] = {**values.get(section, {}), **given_values}
    return values


def complaint(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(values, source="recipe.toml")
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_minimal_recipe_has_every_default(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.run.folder == "runs/mine"
    assert recipe.credits == (recipe.run.staleness_budget + 1) * recipe.run.groups_per_batch
    assert recipe.max_model_tokens == recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens


def test_overrides_win_and_are_typed_as_toml(recipe_file: Path) -> None:
    numbers = ["trainer.learning_rate=2e-6", "run.staleness_budget=0", "data.shuffle=false"]
    words = ['rollout.stop=["</s>"]', "run.run_id=bare-words_are.text", "reward.arguments.pattern=a=b"]
    recipe = load_recipe(recipe_file, [*numbers, *words])
    assert (recipe.trainer.learning_rate, recipe.run.staleness_budget) == (2e-6, 0)
    assert recipe.data.shuffle is False
    assert (recipe.rollout.stop, recipe.run.run_id) == (("</s>",), "bare-words_are.text")
    assert recipe.reward.arguments == {"pattern": "a=b"}


def test_a_malformed_override_is_an_error_with_an_example(recipe_file: Path) -> None:
    for override in ("learning_rate=1", "trainer.learning_rate", "trainer.=1", ".x=1", "=1", ""):
        with pytest.raises(ConfigError, match=r"write section\.key=value"):
            load_recipe(recipe_file, [override])
    with pytest.raises(ConfigError, match="run_id is a value, not a section"):
        load_recipe(recipe_file, ["run.run_id.x=1"])


@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ("trainer", "learningrate", "trainer.learning_rate"),
        ("trainer", "lr_rate", "trainer.learning_rate"),
        ("trainer", "lr", "trainer.learning_rate"),
        ("run", "staleness", "run.staleness_budget"),
        ("rollout", "max_response_token", "rollout.max_response_tokens"),
        ("data", "train_files", "data.train_file"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(section: str, key: str, nearest: str) -> None:
    line = complaint(minimal(**{section: {key: 1}}))
    assert line.startswith(f"recipe.toml: unknown key {section}.{key}")
    assert f"did you mean {nearest}?" in line


def test_an_unknown_section_names_the_nearest_known_one_or_all_keys() -> None:
    assert "did you mean trainer?" in complaint(minimal(trainr={"learning_rate": 1}))
    assert "there are run, model, data" in complaint(minimal(zzzzzzzz={"qqqq": 1}))
    line = complaint(minimal(trainer={"qq": 1}))
    assert "unknown key trainer.qq; there are " in line and "num_ranks, num_nodes" in line


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"run": {"total_batches": 0}}, "run.total_batches"),
        ({"run": {"run_id": "a b"}}, "run.run_id"),
        ({"trainer": {"learning_rate": "fast"}}, "trainer.learning_rate"),
        ({"trainer": {"zero_stage": 4}}, "trainer.zero_stage"),
        ({"weights": {"backend": "pigeon"}}, "weights.backend"),
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature"),
        ({"reward": {"min_scored_samples": 99}}, "reward.min_scored_samples"),
        ({"trainer": {"tokens_per_micro_batch": 8}}, "trainer.tokens_per_micro_batch"),
        ({"rollout": {"engine": "vlm"}}, "rollout.engine: there is no 'vlm'; did you mean vllm?"),
    ],
)
def test_an_invalid_value_is_named_with_its_place(values: dict[str, dict[str, Any]], place: str) -> None:
    assert place in complaint(minimal(**values))


def test_a_missing_key_is_named() -> None:
    values = minimal()
    del values["model"]
    assert complaint(values) == "recipe.toml: model is missing"
    assert complaint(minimal() | {"model": {}}) == "recipe.toml: model.path is missing"
    assert complaint(minimal() | {"model": {"pat": "x"}}).endswith("unknown key model.pat; did you mean model.path?")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.toml", None, "no such file"),
        ("broken.toml", b"[run\n", "is not valid TOML"),
        ("twice.toml", b"a = 1\na = 2\n", "is not valid TOML"),
        ("picture.toml", b"\xff\xfe\x00", "is not text"),
        ("broken.json", b"{", "is not valid JSON"),
        ("list.json", b"[]", "is not a JSON object"),
        ("empty.toml", b"", "run is missing"),
        (".", None, "is a folder"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_a_one_line_error(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load_recipe(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_an_inaccessible_recipe_is_named(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    for file in (recipe_file / "more.toml", tmp_path / "loop.toml", tmp_path / f"{300 * 'x'}.toml"):
        for load in (load_recipe, load_resolved):
            with pytest.raises(ConfigError, match=r"cannot be read \(\w.*\); mend that") as caught:
                load(file)
            assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_saved_recipe_reads_back_the_same_and_takes_overrides(tmp_path: Path, recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["trainer.learning_rate=3e-5", 'rollout.stop=["x"]'])
    saved = tmp_path / "config.json"
    saved.write_text(dump_recipe(recipe))
    assert load_resolved(saved) == load_recipe(saved) == recipe
    assert load_recipe(saved, ["run.seed=7"]).run.seed == 7
    with pytest.raises(ValueError, match="frozen"):
        recipe.run.seed = 1  # type: ignore[misc]
    saved.unlink()
    with pytest.raises(ConfigError, match="a run folder"):
        load_resolved(saved)


def test_known_keys_are_the_keys_of_the_models() -> None:
    known = known_keys(Recipe)
    headed = {f"{key.section}.{key.name}" for key in keys()} | {table.path for table in tables(Recipe)}
    assert headed | set(Recipe.model_fields) == set(known) and len(known) == len(set(known))
    assert all(table.path.removesuffix("[]") in known for table in tables(Recipe))


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
json_values = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    values = {
        "run": {
            "run_id": draw(st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")),
            "folder": draw(texts),
            "seed": draw(st.integers(-(2**40), 2**40)),
            "staleness_budget": draw(st.integers(0, 9)),
            "redis_url": draw(texts),
        },
        "model": {"path": draw(texts)},
        "data": {"train_file": draw(texts.filter(bool)), "shuffle": draw(st.booleans())},
        "rollout": {"stop": draw(st.lists(texts, max_size=3)), "temperature": draw(st.floats(1e-6, 10.0))},
        "reward": {"arguments": draw(st.dictionaries(texts, json_values, max_size=3))},
        "trainer": {
            "learning_rate": draw(st.floats(0.0, 1.0)),
            "adam_betas": [draw(st.floats(0.0, 1.0, exclude_max=True)), 0.99],
        },
    }
    return parse_recipe(values)


@QUIET
@given(recipes())
def test_json_and_toml_of_a_recipe_read_back_as_the_recipe(recipe: Recipe) -> None:
    assert parse_recipe(json.loads(dump_recipe(recipe))) == recipe
    assert parse_recipe(tomllib.loads(as_toml(recipe))) == recipe


@QUIET
@given(st.sampled_from(known_keys(Recipe)).filter(lambda key: "." in key and "[]" not in key), st.data())
def test_a_key_that_lacks_one_letter_is_always_recognised(key: str, data: st.DataObject) -> None:
    above, _, name = key.rpartition(".")
    place = data.draw(st.integers(0, len(name) - 1))
    slip = name[:place] + name[place + 1 :]
    if f"{above}.{slip}" in known_keys(Recipe) or not slip:
        return
    values = minimal()
    apply_overrides(values, [f"{above}.{slip}=1"], Recipe)
    for table in tables(Recipe):  # the misspelling is in the table that has the key
        if table.choice and table.path == above and name in table.model.model_fields:
            apply_overrides(values, [f"{above}.{table.shape.chooser}={table.choice}", f"{above}.{slip}=1"], Recipe)
    assert "did you mean " in complaint(values)


@QUIET
@given(
    st.dictionaries(texts, json_values, max_size=4)
    | st.dictionaries(texts, st.dictionaries(texts, json_values, max_size=3), max_size=3)
)
def test_any_recipe_is_read_or_refused_in_one_line(values: dict[str, Any]) -> None:
    try:
        parse_recipe({**minimal(), **values})
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1


def test_optional_tables_are_absent_by_default() -> None:
    """TOML has no null, so `tandem config` can only write a key that may be absent if it is absent by default."""
    for table in tables(Recipe):
        for name, info in table.fields():
            assert not shape_of(info).optional or default_of(info) is None, table.key(name)


def test_every_key_is_documented_and_the_page_is_fresh() -> None:
    for key in keys():
        assert len(key.doc) > 10, f"{key.section}.{key.name} is not explained"
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tandem.services.config.docs"


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


# ---- numbers ----


def parts_of(annotation: Any) -> Iterator[Any]:
    """An annotation and all types inside it."""
    yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)


def models_below(*roots: type[BaseModel]) -> set[type[BaseModel]]:
    """The models, and the models of their fields, at any depth."""
    found: set[type[BaseModel]] = set()
    waiting = list(roots)
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.add(model)
            parts = (part for info in model.model_fields.values() for part in parts_of(info.annotation))
            waiting += [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    return found


FIELDS = sorted(
    ((model, name) for model in models_below(Recipe, ServiceConfig) for name in model.model_fields),
    key=lambda field: (field[0].__name__, field[1]),
)
NUMBERS = [(model, name) for model, name in FIELDS if float in parts_of(model.model_fields[name].annotation)]


def faults_of(model: type[BaseModel], name: str, value: object) -> set[str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate({name: value})
    return {fault["type"] for fault in caught.value.errors() if fault["loc"][0] == name}


def test_the_search_for_number_fields_finds_them() -> None:
    found = {f"{model.__name__}.{name}" for model, name in NUMBERS}
    wanted = {"TrainerConfig.learning_rate", "LoraOptions.alpha", "RewardConfig.timeout_seconds", "WeightOptions.high"}
    assert wanted <= found and len(found) > 40


@pytest.mark.parametrize(("model", "name"), NUMBERS, ids=lambda part: getattr(part, "__name__", part))
def test_infinite_and_nan_are_refused(model: type[BaseModel], name: str) -> None:
    several = any(
        part is tuple or getattr(part, "__origin__", None) is tuple
        for part in parts_of(model.model_fields[name].annotation)
    )
    for value in (math.inf, -math.inf, math.nan):
        assert "finite_number" in faults_of(model, name, (value, value) if several else value)


@pytest.mark.parametrize("key", ["top_p", "min_p"])
def test_top_p_and_min_p_need_top_k(key: str) -> None:
    assert "need top_k" in complaint(minimal(rollout={key: 0.5}))
    assert parse_recipe(minimal(rollout={key: 0.5, "top_k": 512})).rollout.top_k == 512


@pytest.mark.parametrize("betas", [(2.0, 0.9), (0.9, -1.0), (1.0, 0.9), (0.9, 1.0)])
def test_invalid_adam_betas_are_refused(betas: tuple[float, float]) -> None:
    assert faults_of(TrainerConfig, "adam_betas", betas) <= {"less_than", "greater_than_equal"}
