"""Parsing rubrics: valid text, one-line errors, and which scorers clients and recipes may name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protos.errors import ScorerError
from tandem.reward.config import DeclaredScorer, RewardConfig
from tandem.reward.registry import ScorerSpec, make_spec
from tandem.reward.rubric.rubric import MAX_DEPTH, MAX_SCORERS, MAX_TEXT_BYTES, Catalogue, Component, Rubric

EXACT = make_spec("exact", {})
RECIPE = Catalogue()
CLIENT = Catalogue(for_clients=True)

# ---- reading ----

FULL = """
clip = [0.0, 1.5]
[[components]]
name = "format"
scorer = "regex"
arguments = { pattern = "<answer>", compare = false }
gate = true
pass_at = 0.5
weight = 0.1
[[components]]
scorer = "numeric"
data_sources = ["openai/gsm8k*"]
from = [-1, 1.0]
to = [0.0, 1.0]
clip = [0.0, 1.0]
[[components]]
scorer = "rubric"
arguments = { name = "answers" }
optional = true
[rubrics.answers]
[[rubrics.answers.components]]
scorer = "exact"
"""


def test_every_key_is_read() -> None:
    rubric = Rubric.parse(FULL, allowed=CLIENT)
    form, numeric, answers = rubric.components
    assert rubric.clip == (0.0, 1.5)
    assert (form.name, form.gate, form.pass_at, form.weight) == ("format", True, 0.5, 0.1)
    assert isinstance(form.source, ScorerSpec) and form.source.isolation == "worker"
    scale = ((-1.0, 1.0), (0.0, 1.0))
    source = make_spec("numeric", {})
    assert numeric == Component("numeric", source, data_sources=("openai/gsm8k*",), scale=scale, clip=(0.0, 1.0))
    assert answers == Component("answers", Rubric((Component("exact", EXACT),)), optional=True)
    assert [spec.scorer for spec in rubric.specs()] == ["regex", "numeric", "exact"]
    assert numeric.applies("openai/gsm8k/main") and not numeric.applies("math")


def test_equal_arguments_in_another_order_are_one_scorer() -> None:
    text = '[[components]]\nscorer="numeric"\narguments={%s}'
    first, second = 'tolerance=1,marker="#"', 'marker="#",tolerance=1'
    assert Rubric.parse(text % first, allowed=RECIPE).specs() == Rubric.parse(text % second, allowed=RECIPE).specs()


ONE = '[[components]]\nscorer = "exact"\n'
ANSWRS = "[[components]]\nscorer='rubric'\narguments={name='answrs'}\n[[rubrics.answers.components]]\nscorer='exact'"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "components is missing"),
        ("components = []", "components: should be a list of tables that is not empty (got [])"),
        ("components = [1]", "components[0]: should be a table (got 1)"),
        ("= 1", "the rubric is not valid TOML"),
        (ONE + "wieght = 1", "unknown key components[0].wieght; did you mean components[0].weight?"),
        (ONE + "zzz = 1", "unknown key components[0].zzz; there are name, scorer, arguments"),
        ("clop = [0, 1]\n" + ONE, "unknown key clop; did you mean clip?"),
        (ONE + "[rubrics.a]\ncomponent = []", "unknown key rubrics.a.component; did you mean components?"),
        (ONE + "weight = 'x'", "components[0].weight: should be a number (got 'x')"),
        (ONE + "weight = inf", "components[0].weight: should be a finite number"),
        (ONE + "weight = true", "components[0].weight"),
        (ONE + "gate = 1", "components[0].gate: should be true or false (got 1)"),
        (ONE + "clip = [1]", "components[0].clip: should be a list of 2 numbers (got [1])"),
        (ONE + "clip = [2, 1]", "components[0].clip: the lower end comes first"),
        ("clip = [2, 1]\n" + ONE, "clip: the lower end comes first"),
        (ONE + "pass_at = 1.0", "components[0].pass_at: only a gate has one"),
        (ONE + "gate = true\noptional = true", "components[0].optional: a gate cannot be left out"),
        (ONE + "from = [0, 1]", "components[0].to is missing: from and to go together"),
        (ONE + "to = [0, 1]", "components[0].from is missing"),
        (ONE + "from = [1, 1]\nto = [0, 1]", "components[0].from: its ends must differ"),
        (ONE + "name = 'a/b'", "components[0].name: 'a/b' cannot be a name in the breakdown"),
        (ONE + "name = 'earned'", "components[0].name: 'earned' cannot"),
        (ONE + ONE, "components[1].name: 'exact' is already the name of components[0]"),
        ("[[components]]\nweight = 1", "components[0].scorer is missing"),
        ("[[components]]\nscorer = 'exat'", "components[0].scorer 'exat' is unknown; did you mean exact?"),
        ("[[components]]\nscorer = 'mine'", "components[0].scorer 'mine' is unknown; There are "),
        (ONE + "arguments = {ignore_cas = true}",
         "unknown key components[0].arguments.ignore_cas; did you mean components[0].arguments.ignore_case?"),
        (ONE + "arguments = {ignore_case = 1}",
         "components[0].arguments.ignore_case: should be true or false (got 1)"),
        (ONE + "arguments = {ignore_case = 1979-05-27}", "components[0].arguments.ignore_case: Object of type date"),
        ("[[components]]\nscorer = 'regex'", "components[0].arguments.pattern is missing"),
        ("[[components]]\nscorer = 'regex'\narguments = {pattern = '('}",
         "components[0].arguments.pattern: is not a regular expression"),
        ("[[components]]\nscorer = 'm.py:f'",
         "components[0].scorer 'm.py:f': a client's rubric cannot name an import path"),
        ("[[components]]\nscorer = 'rubric'", "components[0].arguments: scorer rubric takes name"),
        ("[[components]]\nscorer = 'rubric'\narguments = {name = 'a'}",
         "arguments.name: there is no rubric 'a'; there are none"),
        (ANSWRS, "there is no rubric 'answrs'; did you mean answers?"),
        ("a = " + "[" * 30_000, "the rubric is not valid TOML"),
        ("x = '" + "y" * MAX_TEXT_BYTES + "'", f"at most {MAX_TEXT_BYTES} are read"),
        ("components = {" + ".".join("a" * 3000) + " = 1}",
         "components: should be a list of tables that is not empty (got a dict too deep to show)"),
    ],
)  # fmt: skip
def test_invalid_rubrics_are_refused_in_one_line(text: str, told: str) -> None:
    with pytest.raises(ScorerError) as caught:
        Rubric.parse(text, allowed=CLIENT)
    assert told in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 500


@given(st.data())
def test_any_text_is_a_rubric_or_refused_in_one_line(st_data: Any) -> None:
    text = FULL
    for _ in range(st_data.draw(st.integers(1, 4))):
        start = st_data.draw(st.integers(0, len(text)))
        stop = st_data.draw(st.integers(start, min(len(text), start + 12)))
        piece = st_data.draw(st.text(max_size=6) | st.sampled_from(["[[", "]]", "{", "=", '"']))
        text = text[:start] + piece + text[stop:]
    try:
        Rubric.parse(text, allowed=CLIENT)
    except ScorerError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 800


def chain(names: Sequence[str]) -> str:
    """Rubrics that each name the next."""
    text = f"[[components]]\nscorer = 'rubric'\narguments = {{ name = '{names[0]}' }}\n"
    for name, following in pairwise(names):
        text += f"[[rubrics.{name}.components]]\nscorer = 'rubric'\narguments = {{ name = '{following}' }}\n"
    return text


@pytest.mark.parametrize(
    ("names", "around"), [(["a", "a"], "a → a"), (["a", "b", "a"], "a → b → a"), (["x", "a", "b", "a"], "a → b → a")]
)
def test_circular_rubrics_are_refused_with_their_path(names: list[str], around: str) -> None:
    told = f"rubrics.{names[-2]}.components.0..arguments.name: rubrics refer to one another in a circle: {around}$"
    with pytest.raises(ScorerError, match=told):
        Rubric.parse(chain(names), allowed=CLIENT)


def test_nesting_and_number_of_scorers_are_limited() -> None:
    last = "[[rubrics.{}.components]]\nscorer = 'exact'\n"
    names = [f"r{n}" for n in range(MAX_DEPTH)]
    assert Rubric.parse(chain(names) + last.format(names[-1]), allowed=CLIENT).specs() == [EXACT]
    names = [f"r{n}" for n in range(500)]
    with pytest.raises(ScorerError, match=f"nested at most {MAX_DEPTH} deep"):
        Rubric.parse(chain(names) + last.format(names[-1]), allowed=CLIENT)
    doubling = "[[components]]\nscorer = 'rubric'\narguments = {name = 'r0'}\n"
    for n, name in product(range(12), ("left", "right")):
        doubling += f"[[rubrics.r{n}.components]]\nname = '{name}'\n"
        doubling += f"scorer = 'rubric'\narguments = {{name = 'r{n + 1}'}}\n"
    with pytest.raises(ScorerError, match=f"more than {MAX_SCORERS} scorers for one item"):
        Rubric.parse(doubling + last.format("r12"), allowed=CLIENT)


# ---- who may name what ----


def test_recipes_and_clients_may_name_declared_scorers() -> None:
    mine = DeclaredScorer(scorer="my.py:f", arguments={"scale": 2})
    strict = DeclaredScorer(scorer="exact", arguments={"ignore_case": False})
    catalogue = Catalogue.of(RewardConfig(scorers={"mine": mine, "strict": strict}))
    for allowed in (catalogue, replace(catalogue, for_clients=True)):
        rubric = Rubric.parse("[[components]]\nscorer = 'mine'\n[[components]]\nscorer = 'strict'", allowed=allowed)
        assert [component.name for component in rubric.components] == ["mine", "strict"]
        assert [spec.scorer for spec in rubric.specs()] == ["my.py:f", "exact"]
        with pytest.raises(ScorerError, match="scorer mine is declared with its arguments and takes no others"):
            Rubric.parse("[[components]]\nscorer = 'mine'\narguments = {scale = 3}", allowed=allowed)
        with pytest.raises(ScorerError, match="'mne' is unknown; did you mean mine"):
            Rubric.parse("[[components]]\nscorer = 'mne'", allowed=allowed)
    assert Rubric.parse("[[components]]\nscorer = 'my.py:f'", allowed=catalogue).specs()[0].isolation == "worker"


@pytest.mark.parametrize(
    ("name", "scorer", "told"),
    [
        ("exact", "exact", "reward.scorers.exact: the name is taken"),
        ("rubric", "exact", "reward.scorers.rubric: the name is taken"),
        ("a b", "exact", "should be up to 64 letters"),
        ("mine", "exat", "reward.scorers.mine.scorer 'exat' is unknown; did you mean exact?"),
    ],
)
def test_invalid_declarations_are_refused(name: str, scorer: str, told: str) -> None:
    with pytest.raises(ScorerError) as caught:
        Catalogue.of(RewardConfig(scorers={name: DeclaredScorer(scorer=scorer)}))
    assert told in str(caught.value)


def test_clients_cannot_name_remote_scorers_or_set_recipe_only_parameters() -> None:
    for scorer, arguments, told in [
        ("remote", {"url": "http://127.0.0.1:1/"}, "scorer remote: it names a folder or an address"),
        ("code", {"allow_unsandboxed": True}, "arguments.allow_unsandboxed: a client cannot set it"),
    ]:
        RECIPE.spec(scorer, arguments, "here")
        with pytest.raises(ScorerError) as caught:
            CLIENT.spec(scorer, arguments, "here")
        assert told in str(caught.value) and "reward.scorers" in str(caught.value)
    CLIENT.spec("code", {"max_tests": 2}, "here")
    with pytest.raises(ScorerError, match="did you mean math_boxed"):
        CLIENT.spec("math_bxoed", {}, "here")
