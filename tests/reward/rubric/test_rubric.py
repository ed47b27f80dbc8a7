"""Rubrics: how they combine scores, which texts are rubrics, and which scorers clients and recipes may name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.config import DeclaredScorer, RewardConfig
from tandem.reward.registry import SCORERS, ScorerSpec, make_spec
from tandem.reward.rubric.rubric import MAX_DEPTH, MAX_SCORERS, MAX_TEXT_BYTES, Catalogue, Component, Range, Rubric

EXACT = make_spec("exact", {})

finite = st.floats(-1e6, 1e6)
reasons = st.sampled_from(["timeout", "crashed", "infrastructure", "invalid_input", "limit"])
scored = st.builds(Scored, finite, st.dictionaries(st.sampled_from(["acc", "steps", "length"]), finite, max_size=2))
unscored = st.builds(Unscored, reasons, st.text(max_size=5))
ranges = st.tuples(finite, finite).map(lambda pair: (min(pair), max(pair)))
sources = st.sampled_from(["gsm8k", "math", "code/apps"])
patterns = st.one_of(st.none(), st.lists(st.sampled_from(["gsm8k", "m*", "code/*", "x"]), max_size=2).map(tuple))


@st.composite
def components(draw: st.DrawFn, *, gates: bool = True) -> tuple[Component, ...]:
    made = []
    for place in range(draw(st.integers(1, 6))):
        gate = gates and draw(st.booleans())
        scale = draw(st.one_of(st.none(), st.tuples(ranges, ranges)))
        scale = scale if scale and scale[0][1] - scale[0][0] > 1e-3 else None
        clip, sources = draw(st.one_of(st.none(), ranges)), draw(patterns)
        component = Component(f"c{place}", EXACT, draw(finite), gate, data_sources=sources, scale=scale, clip=clip)
        kind = {"pass_at": draw(finite)} if gate else {"optional": draw(st.booleans())}
        made.append(replace(component, **kind))
    return tuple(made)


def scores_of(draw: Any, rubric: Rubric, kinds: st.SearchStrategy[Score]) -> list[Score]:
    return [draw(kinds) for _ in rubric.components]


@given(st.data(), st.builds(Rubric, components()), sources)
def test_the_value_is_the_weighted_sum_of_what_the_breakdown_names(st_data: Any, rubric: Rubric, source: str) -> None:
    scores = scores_of(st_data.draw, rubric, scored)
    result = rubric.combine(scores, source)
    mine = [component for component in rubric.components if component.applies(source)]
    if not mine:
        assert isinstance(result, Unscored) and result.reason == "invalid_input" and source in result.detail
        return
    assert isinstance(result, Scored)
    assert {name for name in result.breakdown if "/" not in name} == {component.name for component in mine}
    assert result.value == math.fsum(component.weight * result.breakdown[component.name] for component in mine)


@given(st.data(), st.builds(Rubric, components()), sources)
def test_components_after_a_failed_gate_count_0(st_data: Any, rubric: Rubric, source: str) -> None:
    scores: list[Score | None] = list(scores_of(st_data.draw, rubric, scored))
    result = rubric.combine(scores, source)
    if not isinstance(result, Scored):
        return
    mine = [n for n, component in enumerate(rubric.components) if component.applies(source)]
    gates = [n for n in mine if rubric.components[n].gate]
    failed = [n for n in gates if rubric.components[n].normalised(scores[n].value) < rubric.components[n].pass_at]
    for n in mine:
        component = rubric.components[n]
        if failed and n > failed[0]:
            assert result.breakdown[component.name] == 0.0
            assert not any(name.startswith(f"{component.name}/") for name in result.breakdown)
        else:
            assert result.breakdown[component.name] == component.normalised(scores[n].value)  # type: ignore[union-attr]
    if failed:  # components after a failed gate may not have run
        unrun = [score if n <= failed[0] else None for n, score in enumerate(scores)]
        assert rubric.combine(unrun, source) == result


@given(st.data(), st.builds(Rubric, components(gates=False), st.one_of(st.none(), ranges)), sources)
def test_without_gates_the_order_of_components_does_not_matter(st_data: Any, rubric: Rubric, source: str) -> None:
    scores = scores_of(st_data.draw, rubric, st.one_of(scored, unscored))
    order = st_data.draw(st.permutations(range(len(scores))))
    other = replace(rubric, components=tuple(rubric.components[n] for n in order))
    first, second = rubric.combine(scores, source), other.combine([scores[n] for n in order], source)
    if isinstance(first, Scored):
        assert second == first
    else:
        assert isinstance(second, Unscored)


@given(st.data(), st.builds(Rubric, components(gates=False)), sources)
def test_an_unscored_component_is_never_a_number(st_data: Any, rubric: Rubric, source: str) -> None:
    scores = scores_of(st_data.draw, rubric, st.one_of(scored, unscored))
    result = rubric.combine(scores, source)
    mine = [(c, s) for c, s in zip(rubric.components, scores, strict=True) if c.applies(source)]
    needed = [(c, s) for c, s in mine if isinstance(s, Unscored) and not c.optional]
    if needed:
        component, score = needed[0]
        assert result == Unscored(score.reason, f"{component.name}: {score.detail}")
    elif any(isinstance(s, Scored) for _, s in mine):
        assert isinstance(result, Scored)
        assert {n for n in result.breakdown if "/" not in n} == {c.name for c, s in mine if isinstance(s, Scored)}
    else:
        assert isinstance(result, Unscored)


@given(ranges, ranges, st.floats(0, 1), st.one_of(st.none(), ranges), finite)
def test_normalisation_keeps_its_bounds(
    old: Range, new: Range, share: float, clip: Range | None, any_value: float
) -> None:
    if old[1] - old[0] < 1e-3:
        return
    component = Component("c", EXACT, scale=(old, new))
    assert component.normalised(old[0]) == new[0] and component.normalised(old[1]) == new[1]
    inside = component.normalised(min(max(old[0] + share * (old[1] - old[0]), old[0]), old[1]))
    slack = 1e-9 * (1 + max(map(abs, new)))
    assert new[0] - slack <= inside <= new[1] + slack
    upside_down = Component("c", EXACT, scale=(old, (new[1], new[0])))
    assert upside_down.normalised(old[0]) == new[1]
    if clip is not None:
        assert clip[0] <= Component("c", EXACT, scale=(old, new), clip=clip).normalised(any_value) <= clip[1]


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=5), ranges)
def test_the_sum_is_clipped(parts: list[tuple[float, float]], clip: Range) -> None:
    made = tuple(Component(f"c{n}", EXACT, weight=weight) for n, (weight, _) in enumerate(parts))
    result = Rubric(made, clip).combine([Scored(value) for _, value in parts])
    plain = Rubric(made).combine([Scored(value) for _, value in parts])
    assert isinstance(result, Scored) and isinstance(plain, Scored)
    assert clip[0] <= result.value <= clip[1] and result.breakdown == plain.breakdown
    if clip[0] <= plain.value <= clip[1]:
        assert result.value == plain.value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308])
def test_a_sum_that_is_not_finite_is_unscored(value: float) -> None:
    rubric = Rubric((Component("a", EXACT, weight=1e10), Component("b", EXACT)))
    assert rubric.combine([Scored(value), Scored(0.0)]) == Unscored(
        "invalid_input", "the sum of the components is not a finite number"
    )


def test_the_breakdown_names_parts_below_their_component_and_is_that_of_a_single_scorer() -> None:
    rubric = Rubric((Component("math", EXACT, weight=0.5), Component("", EXACT)))
    result = rubric.combine([Scored(1.0, {"acc": 1.0}), Scored(2.0, {"own": 3.0})])
    assert result == Scored(2.5, {"math": 1.0, "math/acc": 1.0, "own": 3.0})
    for score in (Scored(0.5, {"acc": 1.0}), Unscored("timeout", "10 s")):
        assert Rubric.alone(EXACT).combine([score]) == score


def test_stages_end_with_gates() -> None:
    gates = [False, True, False, False, True]
    rubric = Rubric(tuple(Component(str(n), EXACT, gate=gate) for n, gate in enumerate(gates)))
    assert rubric.stages() == [[0, 1], [2, 3, 4]]


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
    RECIPE.spec("remote", {"url": "http://127.0.0.1:1/"}, "here")
    for scorer in ("judge", "pairwise", "group_rank", "remote", "reward_model"):
        assert SCORERS[scorer].ISOLATION == "remote"
        told = f"here.scorer {scorer}: it names a folder or an address, which a client cannot; .* in reward.scorers"
        with pytest.raises(ScorerError, match=told):
            CLIENT.spec(scorer, {}, "here")
    RECIPE.spec("code", {"allow_unsandboxed": True}, "here")
    with pytest.raises(ScorerError, match=r"allow_unsandboxed: a client cannot set it; .* in reward.scorers"):
        CLIENT.spec("code", {"allow_unsandboxed": True}, "here")
    CLIENT.spec("code", {"max_tests": 2}, "here")
    with pytest.raises(ScorerError, match="did you mean math_boxed"):
        CLIENT.spec("math_bxoed", {}, "here")
