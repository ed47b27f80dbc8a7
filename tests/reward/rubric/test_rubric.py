"""Rubrics: properties of combining scores."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, Unscored
from tandem.reward.registry import make_spec
from tandem.reward.rubric.rubric import Component, Range, Rubric

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


def test_the_breakdown_names_parts_below_their_component() -> None:
    rubric = Rubric((Component("math", EXACT, weight=0.5), Component("", EXACT)))
    result = rubric.combine([Scored(1.0, {"acc": 1.0}), Scored(2.0, {"own": 3.0})])
    assert result == Scored(2.5, {"math": 1.0, "math/acc": 1.0, "own": 3.0})


def test_a_single_scorer_keeps_its_breakdown() -> None:
    rubric = Rubric.alone(EXACT)
    assert rubric.combine([Scored(0.5, {"acc": 1.0})]) == Scored(0.5, {"acc": 1.0})
    assert rubric.combine([Unscored("timeout", "10 s")]) == Unscored("timeout", "10 s")


def test_stages_end_with_gates() -> None:
    gates = [False, True, False, False, True]
    rubric = Rubric(tuple(Component(str(n), EXACT, gate=gate) for n, gate in enumerate(gates)))
    assert rubric.stages() == [[0, 1], [2, 3, 4]]
