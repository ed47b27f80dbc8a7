"""Tables chosen by name: how they are written, overridden, refused, dumped and documented, on models made for it."""

from __future__ import annotations

import json
import tomllib
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tandem.protos.errors import ConfigError
from tandem.services.config.docs import as_toml, explained, keys, page
from tandem.services.config.other_names import explain
from tandem.services.config.overrides import apply_overrides
from tandem.trainer.named_options import named

QUIET = settings(deadline=None, max_examples=60)  # a slow machine is no failure


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Clipped(Strict):
    """PPO's clipped surrogate."""

    name: Literal["clipped"] = "clipped"
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """Lower clip of the ratio."""
    clip_high: Annotated[float, Field(ge=0.0)] = 0.2
    """Upper clip of the ratio."""


class Sequence(Clipped):
    """A clip of whole sequences; its keys are inherited."""

    name: Literal["sequence"] = "sequence"  # type: ignore[assignment]
    bounds: float | tuple[float, float] = 2.0
    """One bound, or a lower and an upper one."""


class Gate(Strict):
    """A soft gate."""

    name: Literal["gate"] = "gate"
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """How sharp the gate is."""


class Plain(Strict):
    """Nothing to set."""

    name: Literal["plain"] = "plain"


Loss = Annotated[Clipped | Sequence | Gate | Plain, Field(discriminator="name")]


class Rule(Strict):
    """A rule of rejection."""

    level: Literal["token", "sequence"] = "token"
    """What is rejected."""
    limit: float | None = None
    """Its bound, if it has one."""


class Correction(Strict):
    """What corrects."""

    preset: Literal["soft", "hard"] = "soft"
    """A published combination."""
    cap: Annotated[float, Field(gt=0.0)] = 2.0
    """Weights above it are cut."""
    rules: tuple[Rule, ...] = ()
    """Rules of rejection, one after another."""
    veto: float = float("inf")
    """Ratio that vetoes a sequence."""


class Adapters(Strict):
    """`[trainer.adapters]`: low-rank adapters."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Their rank."""
    layers: Literal["all"] | tuple[str, ...] = "all"
    """Layers that get them."""


class Trainer(Strict):
    """`[trainer]`: how it learns."""

    rate: float = 1e-6
    """Learning rate."""
    mode: Literal["token-mean", "seq-mean"] = "token-mean"
    """What is averaged."""
    loss: Annotated[Loss, named("clipped")] = Clipped()
    """What is minimised."""
    second_loss: Annotated[Loss, named("gate", elsewhere={"door": "gate"})] | None = None
    """A loss beside it."""
    correction: Annotated[Correction, named("soft", key="preset")] = Correction()
    """How stale samples are corrected."""
    adapters: Adapters | None = None
    """Train these alone."""

    @model_validator(mode="after")
    def _fit(self) -> Trainer:
        if self.adapters is not None and self.rate > 1.0:
            raise ValueError("rate is above 1 with adapters")
        return self


class Toy(Strict):
    trainer: Trainer = Trainer()


def read(trainer: Any = None, *overrides: str) -> Trainer:
    values: dict[str, Any] = {"trainer": {} if trainer is None else trainer}
    apply_overrides(values, overrides, Toy)
    return Toy.model_validate(values).trainer


def complaint(trainer: Any, *overrides: str) -> str:
    with pytest.raises(ValidationError) as caught:
        read(trainer, *overrides)
    line = explain(Toy, caught.value)
    assert "\n" not in line
    return line


# --- writing


def test_a_bare_name_is_a_table_and_a_table_without_a_name_has_the_default_one() -> None:
    assert read({"loss": "gate"}).loss == Gate()
    assert read({"loss": {"name": "gate", "temperature": 2}}).loss == Gate(temperature=2.0)
    assert read({"loss": {"clip_low": 0.1}}).loss == Clipped(clip_low=0.1)
    assert read({"loss": {}}).loss == read().loss == Clipped()
    assert read({"loss": Sequence()}).loss == Sequence()
    assert read({"second_loss": {"temperature": 3}}).second_loss == Gate(temperature=3.0)
    assert read({"second_loss": "plain"}).second_loss == Plain()
    assert read({"correction": "hard"}).correction == Correction(preset="hard")
    assert read({"adapters": {}}).adapters == Adapters()


@pytest.mark.parametrize(
    ("given_table", "overrides", "loss"),
    [
        (None, ["trainer.loss=gate"], Gate()),
        (None, ["trainer.loss.clip_low=0.1"], Clipped(clip_low=0.1)),
        (None, ["trainer.loss.name=gate", "trainer.loss.temperature=2"], Gate(temperature=2.0)),
        ("sequence", ["trainer.loss.clip_low=0.1"], Sequence(clip_low=0.1)),
        ("clipped", ["trainer.loss=gate", "trainer.loss.temperature=3"], Gate(temperature=3.0)),
        ("clipped", ["trainer.loss.temperature=3", "trainer.loss=gate"], Gate(temperature=3.0)),
        ({"clip_high": 0.3}, ["trainer.loss=sequence"], Sequence()),
        ({"clip_high": 0.3}, ["trainer.loss.name=sequence"], Sequence()),
        ({"clip_high": 0.3}, ["trainer.loss.clip_low=0.1", "trainer.loss.name=sequence"], Sequence(clip_low=0.1)),
        ({"clip_high": 0.3}, ["trainer.loss.name=clipped"], Clipped(clip_high=0.3)),
        (
            {"clip_high": 0.3},
            ["trainer.loss.clip_low=0", "trainer.loss.clip_low=1"],
            Clipped(clip_low=1, clip_high=0.3),
        ),
        ("gate", ['trainer.loss={name = "sequence", bounds = [0.5, 2]}'], Sequence(bounds=(0.5, 2.0))),
    ],
)
def test_an_override_changes_a_table_in_any_notation(given_table: Any, overrides: list[str], loss: BaseModel) -> None:
    assert read({} if given_table is None else {"loss": given_table}, *overrides).loss == loss


def test_optional_tables_are_switched_on_and_off() -> None:
    assert read(None, "trainer.adapters.rank=8").adapters == Adapters(rank=8)
    assert read({"adapters": None}, "trainer.adapters.rank=8").adapters == Adapters(rank=8), "as a saved recipe has it"
    assert read({"adapters": {"rank": 4}}, "trainer.adapters=none").adapters is None
    assert read({"second_loss": "plain"}, "trainer.second_loss=none").second_loss is None
    assert read(None, "trainer.correction.cap=3").correction == Correction(cap=3.0)
    assert read({"correction": "hard"}, "trainer.correction.cap=3").correction == Correction(preset="hard", cap=3.0)
    assert read({"correction": {"cap": 4}}, "trainer.correction.preset=hard").correction == Correction(preset="hard")


def test_an_override_below_a_value_or_a_list_is_refused() -> None:
    for key in ("trainer.rate.x", "trainer.loss.clip_low.x", "trainer.correction.rules.level"):
        with pytest.raises(ConfigError, match="is a value, not a section"):
            read({"rate": 1.0, "loss": {"clip_low": 0.1}, "correction": {"rules": []}}, f"{key}=1")


# --- faults


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        ({"loss": "sequense"}, "trainer.loss: there is no 'sequense'; did you mean sequence?"),
        ({"second_loss": "door"}, "trainer.second_loss: there is no 'door'; did you mean gate?"),
        ({"loss": {"name": "Gate"}}, "trainer.loss: there is no 'Gate'; did you mean gate?"),
        ({"loss": "zzz"}, "trainer.loss: there is no 'zzz'; there are clipped, sequence, gate, plain"),
        ({"loss": ""}, "trainer.loss: there is no ''; there are clipped, sequence, gate, plain"),
        ({"loss": {"name": 3}}, "trainer.loss: there is no '3'; there are clipped, sequence, gate, plain"),
        ({"loss": 3}, "trainer.loss: should be a name or table (got 3)"),
        ({"loss": {"clip_lo": 1}}, "unknown key trainer.loss.clip_lo; did you mean trainer.loss.clip_low?"),
        ({"loss": {"zzz": 1}}, "unknown key trainer.loss.zzz; there are name, clip_low, clip_high"),
        ({"loss": {"temperature": 1}}, "unknown key trainer.loss.temperature: it belongs to gate, not to clipped"),
        (
            {"loss": {"name": "gate", "clip_low": 1}},
            "unknown key trainer.loss.clip_low: it belongs to clipped and sequence, not to gate",
        ),
        ({"clip_lo": 1}, "unknown key trainer.clip_lo; there are rate, mode, loss, second_loss, correction, adapters"),
        ({"bounds": 1}, "unknown key trainer.bounds; did you mean trainer.loss.bounds or trainer.second_loss.bounds?"),
        ({"cap": 1}, "unknown key trainer.cap; did you mean trainer.correction.cap?"),
        ({"loss": {"name": "gate", "temperature": 0}}, "trainer.loss.temperature: should be a number > 0.0 (got 0)"),
        (
            {"second_loss": {"name": "clipped", "clip_low": "low"}},
            "trainer.second_loss.clip_low: should be a number ≥ 0.0, ≤ 1.0 (got 'low')",
        ),
        (
            {"loss": {"name": "sequence", "bounds": "wide"}},
            "trainer.loss.bounds: should be a number or list of 2 numbers (got 'wide')",
        ),
        ({"adapters": {"rank": 0}}, "trainer.adapters.rank: should be an integer ≥ 1 (got 0)"),
        ({"adapters": {"ranks": 1}}, "unknown key trainer.adapters.ranks; did you mean trainer.adapters.rank?"),
        ({"adapters": {"layers": 3}}, 'trainer.adapters.layers: should be "all" or list of text (got 3)'),
        ({"adapters": "all"}, "trainer.adapters: should be a table (got 'all')"),
        ({"correction": "sofd"}, "trainer.correction.preset: there is no 'sofd'; did you mean soft?"),
        ({"correction": 2}, "trainer.correction: should be a preset or table (got 2)"),
        (
            {"correction": {"rules": [{}, {"levle": 1}]}},
            "unknown key trainer.correction.rules[1].levle; did you mean trainer.correction.rules[1].level?",
        ),
        ({"mode": "token_mean"}, "trainer.mode: there is no 'token_mean'; did you mean token-mean?"),
        ({"rate": 2, "adapters": {}}, "trainer: rate is above 1 with adapters"),
    ],
)
def test_an_error_names_its_place_as_the_user_writes_it(trainer: dict[str, Any], line: str) -> None:
    assert complaint(trainer) == line


def test_a_table_at_the_top_level_names_its_section() -> None:
    with pytest.raises(ValidationError) as caught:
        Toy.model_validate({"loss": {"name": "gate"}})
    assert explain(Toy, caught.value) == "unknown key loss; did you mean trainer.loss?"


# "tag" is what pydantic calls the name of a union's member. Hypothesis tries the words of this file as texts.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda text: "tag" not in text)
NAMES = ["gate", "sequence", "hard"]
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(), texts, st.sampled_from(NAMES)),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from([key.name for key in keys(Toy)]) | texts, inner, max_size=3)
    ),
    max_leaves=6,
)


@QUIET
@given(st.dictionaries(st.sampled_from(list(Trainer.model_fields)), values, max_size=4))
def test_any_table_is_read_or_refused_in_one_line(trainer: dict[str, Any]) -> None:
    try:
        read(trainer)
    except ValidationError as error:
        line = explain(Toy, error)
        assert len(line.splitlines()) == 1
        assert ".clipped." not in line and ".gate." not in line and "tag" not in line


# --- round trips

some_floats = st.floats(0.0, 1.0)
losses = st.one_of(
    st.builds(Clipped, clip_low=some_floats, clip_high=some_floats),
    st.builds(Sequence, clip_low=some_floats, bounds=some_floats | st.tuples(some_floats, some_floats)),
    st.builds(Gate, temperature=st.floats(1e-3, 10.0)),
    st.just(Plain()),
)
trainers = st.builds(
    Trainer,
    rate=some_floats,
    loss=losses,
    second_loss=st.none() | losses,
    correction=st.builds(
        Correction,
        preset=st.sampled_from(["soft", "hard"]),
        veto=st.floats(1.0, allow_nan=False),
        rules=st.lists(st.builds(Rule, limit=st.none() | some_floats), max_size=2).map(tuple),
    ),
    adapters=st.none() | st.builds(Adapters, layers=st.just("all") | st.lists(texts, max_size=2).map(tuple)),
)


@QUIET
@given(trainers)
def test_dumped_json_and_toml_read_back_as_the_same_table(trainer: Trainer) -> None:
    toy = Toy(trainer=trainer)
    assert Toy.model_validate(json.loads(json.dumps(toy.model_dump(mode="json")))) == toy
    assert Toy.model_validate(tomllib.loads(as_toml(toy))) == toy


@QUIET
@given(trainers)
def test_overrides_key_by_key_give_the_same_table(trainer: Trainer) -> None:
    """Gives every leaf of a dump as an override of the empty recipe, in any order."""
    lines = as_toml(Toy(trainer=trainer)).split("\n")
    section, overrides = "", []
    for line in lines:
        if line.startswith("["):
            section = line.partition("]")[0].strip("[")
            overrides.append(f"{section}={{}}") if section.count(".") else None
        elif line:
            key, _, value = line.partition(" = ")
            overrides.append(f"{section}.{key}={value}")
    assert read(None, *reversed(overrides)) == trainer


# --- documentation of tables


def test_toml_marks_what_differs_from_the_default_of_the_chosen_table() -> None:
    trainer = read({"loss": {"name": "sequence", "clip_low": 0.1}, "adapters": {}, "second_loss": "plain"})
    assert as_toml(Toy(trainer=trainer)).splitlines() == [
        "[trainer]",
        "rate = 1e-06",
        'mode = "token-mean"',
        "",
        "[trainer.loss]",
        'name = "sequence"  # default: "clipped"',
        "clip_low = 0.1  # default: 0.2",
        "clip_high = 0.2",
        "bounds = 2.0",
        "",
        "[trainer.second_loss]  # default: none",
        'name = "plain"',
        "",
        "[trainer.correction]",
        'preset = "soft"',
        "cap = 2.0",
        "rules = []",
        "veto = inf",
        "",
        "[trainer.adapters]  # default: none",
        "rank = 16",
        'layers = "all"',
    ]


def test_every_key_is_explained_with_the_choice_it_belongs_to() -> None:
    said = list(explained(Toy))
    assert "trainer.rate (number; default 1e-06)\n    Learning rate." in said
    assert 'trainer.loss (name or table; default "clipped")\n    What is minimised.' in said
    assert "trainer.loss.temperature of gate (number > 0.0; default 1.0)\n    How sharp the gate is." in said
    assert "trainer.loss.clip_low of sequence (number ≥ 0.0, ≤ 1.0; default 0.2)\n    Lower clip of the ratio." in said
    assert "trainer.adapters (table; default none)\n    Train these alone." in said
    assert sum(line.startswith("trainer.loss.name ") for line in said) == 1


def test_the_page_has_a_section_for_every_table_and_one_for_every_choice() -> None:
    lines = page(Toy).splitlines()
    choices = [f'### `name = "{name}"`' for name in ("clipped", "sequence", "gate", "plain")]
    assert [line for line in lines if line.startswith("#")] == [
        "# Configuration",
        "## `[trainer]`",
        "## `[trainer.loss]`",
        *choices,
        "## `[trainer.second_loss]`",
        *choices,
        "## `[trainer.correction]`",
        "## `[[trainer.correction.rules]]`",
        "## `[trainer.adapters]`",
    ]
    assert "- `temperature` (number > 0.0; default `1.0`): How sharp the gate is." in lines
    assert '- `loss` (name or table; default `"clipped"`): What is minimised.' in lines
    assert "Low-rank adapters." in lines and lines.count("Nothing to set.") == 2
