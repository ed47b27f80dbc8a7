"""The scoring core: rubrics with every kind of scorer, where scorers run, what clients and recipes may name."""

from __future__ import annotations

import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward import scoring
from tandem.reward.config import RewardConfig
from tandem.reward.rubric.rubric import Rubric
from tandem.reward.scorers.exact import ExactMatch
from tandem.reward.scoring import ScoringCore, validate
from tests.support.scoring_stand_ins import Far, Make, item, score
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("stand_ins")


# ---- single scorers ----


def test_a_single_cheap_scorer_starts_no_process_and_is_called_directly(make_core: Make) -> None:
    before = psutil.Process().children()
    core = make_core(scorer="numeric", arguments={"tolerance": 0.2})
    assert core.default.in_process and core.default.sole is not None and core.default.num_callers == 1
    assert score(core, core.default, item("5", "6"), item("4", "6")) == [Scored(1.0), Scored(0.0)]
    assert psutil.Process().children() == before and core.figures()["workers_replaced"] == 0
    assert score(core, core.default) == []


def test_a_single_function_keeps_its_breakdown(make_core: Make, functions: Path) -> None:
    core = make_core(scorer=f"{functions}:compute_score", num_workers=2, timeout_seconds=1.0)
    assert not core.default.in_process and core.default.num_callers == 2
    scores = score(core, core.default, item("1"), item("hang"), item("die"), item("2"))
    assert [scores[0], scores[3]] == [Scored(1.0, {"acc": 1.0}), Scored(0.0, {"acc": 0.0})]
    assert [one.reason for one in scores[1:3] if isinstance(one, Unscored)] == ["timeout", "crashed"]
    assert core.figures()["workers_replaced"] == 2


def test_an_endless_regular_expression_is_a_timeout(make_core: Make) -> None:
    core = make_core(scorer="regex", arguments={"pattern": "(a+)+$"}, timeout_seconds=0.5)
    scores = score(core, core.default, item("a" * 60 + "b", "a"), item("baa", "aa"))
    assert scores == [Unscored("timeout", "no answer within 0.5 s"), Scored(1.0)]


# ---- rubrics ----


def test_one_rubric_with_every_kind_of_scorer(make_core: Make, mixed: Path) -> None:
    core = make_core(rubric=str(mixed), num_workers=2, timeout_seconds=1.0)
    rows = [("1", "numbers/a"), ("1", "words"), ("not so", "words"), ("die", "words"), ("3", "others")]
    scores = score(core, core.default, *(item(text, "1", source) for text, source in rows))
    assert scores[0] == Scored(1.5, {"format": 1.0, "numeric": 1.0, "same": 1.0})
    assert scores[1] == Scored(2.5, {"format": 1.0, "compute_score": 1.0, "compute_score/acc": 1.0, "same": 1.0})
    assert scores[2] == Scored(0.0, {"format": 0.0, "compute_score": 0.0, "same": 0.0})
    assert scores[3] == Unscored("crashed", "compute_score: the scoring process exited with code 9")
    assert scores[4] == Scored(0.5, {"format": 1.0, "same": 0.0})
    judged = (mixed.parent / "judged").read_text().split("\n")
    assert sorted(filter(None, judged)) == ["1", "die"], "what did not pass the gate was not run"


def test_many_items_keep_their_order(make_core: Make, mixed: Path) -> None:
    core = make_core(rubric=str(mixed), num_workers=2)
    items = [item(str(n), str(n + n % 3), ("words", "numbers", "x")[n % 3]) for n in range(600)]
    for n, one in enumerate(score(core, core.default, *items)):
        weight = {0: 2.0, 1: 0.0, 2: 0.0}[n % 3]  # the word scorer gives 1 only if n % 3 is 0
        assert isinstance(one, Scored) and one.value == 0.5 + weight, n


def test_optional_components_are_left_out(make_core: Make) -> None:
    core = make_core(scorers={"costly": {"scorer": "far", "arguments": {"value": 0.25}}})
    text = "[[components]]\nscorer = 'exact'\n[[components]]\nscorer = 'costly'\n"
    needed, optional = core.compile(text), core.compile(text + "optional = true")
    items = item("1"), item("costly")
    both = Scored(1.25, {"exact": 1.0, "costly": 0.25})
    assert score(core, needed, *items) == [both, Unscored("limit", "costly: spent")]
    assert score(core, optional, *items)[1] == Scored(0.0, {"exact": 0.0})


def test_rubrics_within_rubrics(make_core: Make) -> None:
    core = make_core()
    rubric = core.compile(
        """
[[components]]
scorer = "rubric"
arguments = { name = "inner" }
weight = 0.5
[[components]]
name = "twice"
scorer = "rubric"
arguments = { name = "inner" }
from = [0, 2]
to = [0, 1]
[rubrics.inner]
[[rubrics.inner.components]]
scorer = "exact"
gate = true
[[rubrics.inner.components]]
scorer = "regex"
arguments = { pattern = "1", compare = false }
"""
    )
    right, wrong = score(core, rubric, item("1"), item("2"))
    ones = dict.fromkeys(["inner/exact", "inner/regex", "twice", "twice/exact", "twice/regex"], 1.0)
    assert right == Scored(2.0, {"inner": 2.0, **ones})
    assert isinstance(wrong, Scored) and wrong.value == 0.0


def test_grouped_scorers_get_whole_groups(make_core: Make) -> None:
    core = make_core()
    rubric = core.compile("[[components]]\nscorer = 'rank'\n")
    assert rubric.grouped and rubric.in_process and not core.default.grouped
    items = [item("a" * n, group=group) for n, group in [(1, "x"), (3, "y"), (2, "x"), (1, "y"), (3, "x")]]
    assert [one.value for one in score(core, rubric, *items) if isinstance(one, Scored)] == [0, 1, 1, 0, 2]


texts = st.text(alphabet="01ab .", max_size=4)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(texts, texts, st.sampled_from(["m", "n", ""])), max_size=6),
    st.booleans(),
    st.sampled_from([None, ["m"], ["n", "m*"]]),
)
def test_scores_equal_those_of_the_rubric_combined_by_hand(
    rows: list[tuple[str, str, str]], gate: bool, only: list[str] | None
) -> None:
    text = "[[components]]\nname = 'a'\nscorer = 'exact'\nweight = 0.5\n" + ("gate = true\n" if gate else "")
    text += "[[components]]\nname = 'b'\nscorer = 'exact'\narguments = {ignore_case = true}\n"
    text += f"data_sources = {only}\n" if only else ""
    core = ScoringCore(RewardConfig())
    rubric = core.compile(text)
    items = [item(solution, truth, source) for solution, truth, source in rows]
    judges = ExactMatch(), ExactMatch(ignore_case=True)
    expected = [rubric.rubric.combine([judge.judge(one) for judge in judges], one.data_source) for one in items]
    assert score(core, rubric, *items) == expected
    core.close()


# ---- closing ----


def test_close_ends_running_calls(make_core: Make, functions: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    core = make_core(scorer=f"{functions}:compute_score", arguments={"log": str(log)}, timeout_seconds=600.0)
    found: list[Score] = []
    caller = threading.Thread(target=lambda: found.extend(score(core, core.default, item("hang"))))
    caller.start()
    eventually(lambda: log.exists() and log.read_text() == "hang\n")
    assert not core.closing
    core.close()
    caller.join(timeout=30.0)
    closing = [Unscored("infrastructure", "the scorer is closing")]
    assert core.closing and found == closing and score(core, core.default, item("1")) == closing
    core.close()  # a second close has no effect


def test_many_threads_score_by_many_rubrics(make_core: Make, mixed: Path) -> None:
    core = make_core(rubric=str(mixed), num_workers=2)
    other = core.compile(
        "[[components]]\nscorer = 'exact'\n[[components]]\nscorer = 'regex'\narguments = {pattern='(.)'}\n"
    )

    def call(number: int) -> None:
        for n in range(10):
            text = str((n + number) % 2)
            right = float(text == "1")
            assert score(core, other, item(text)) == [Scored(2 * right, {"exact": right, "regex": right})]
            mixed_score = Scored(0.5 + right, {"format": 1.0, "numeric": right, "same": right})
            assert score(core, core.default, item(text, "1", "numbers")) == [mixed_score]

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(call, range(6), timeout=60.0))


# ---- client rubrics ----


def test_client_rubrics_are_cached_by_text(make_core: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "MAX_RUBRICS", 2)
    core = make_core()
    text = "[[components]]\nscorer = 'numeric'\n"
    assert core.compile(text) is core.compile(text) is not core.compile(text + "weight = 2")
    assert core.compile("") is core.default
    first = core.compile(text)
    for weight in range(3):
        core.compile(text + f"weight = {weight}")
    assert core.compile(text) is not first and core.compile(text).digest == first.digest


def test_client_rubrics_may_name_declared_scorers(make_core: Make, functions: Path) -> None:
    near = {"scorer": "far", "arguments": {"name": "n"}}
    core = make_core(scorers={"mine": {"scorer": f"{functions}:compute_score"}, "near": near})
    assert Far.seen == ["start n"]
    rubric = core.compile("[[components]]\nscorer = 'mine'\n[[components]]\nscorer = 'near'\n")
    assert score(core, rubric, item("1")) == [Scored(2.0, {"mine": 1.0, "mine/acc": 1.0, "near": 1.0})]
    infos = {info.name: info for info in core.scorers()}
    assert (infos["mine"].isolation, infos["near"].isolation) == ("worker", "remote")
    assert "far" not in infos and infos["exact"].parameters and not infos["near"].parameters
    with pytest.raises(ScorerError, match="cannot name an import path"):
        core.compile(f"[[components]]\nscorer = '{functions}:compute_score'")


def test_the_default_can_be_asked_for_as_a_rubric(make_core: Make, tmp_path: Path) -> None:
    core = make_core(scorer="numeric", arguments={"marker": "a\"\\d+'"})
    again = Rubric.parse(core.default.text, allowed=core._clients)
    assert [spec.key for spec in again.specs()] == [spec.key for spec in core.default.rubric.specs()]
    (tmp_path / "rubric.toml").write_text("[[components]]\nscorer = 'exact'  # a comment\n")
    assert make_core(rubric=str(tmp_path / "rubric.toml")).default.text == (tmp_path / "rubric.toml").read_text()


# ---- remote scorers ----


def test_remote_scorers_of_one_rubric_run_concurrently(make_core: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "b", "c"]
    core = make_core(scorers={name: {"scorer": "far", "arguments": {"name": name}} for name in names})
    rubric = core.compile("".join(f"[[components]]\nscorer = '{name}'\n" for name in names))
    assert rubric.num_callers > 1 and not rubric.in_process
    monkeypatch.setattr(Far, "meeting", threading.Barrier(3))  # times out unless all three meet
    assert score(core, rubric, item("x"), item("y")) == [Scored(3.0, dict.fromkeys(names, 1.0))] * 2
    assert core.figures()["spent_b:b"] == 0.5
    core.close()
    assert sorted(one for one in Far.seen if one.startswith("close")) == ["close a", "close b", "close c"]


def test_a_nonfinite_remote_score_is_infrastructure(make_core: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(scorer="far")
    monkeypatch.setattr(Far, "judge_batch", lambda self, items, priority: [Scored(math.nan) for _ in items])
    assert score(core, core.default, item("x")) == [
        Unscored("infrastructure", "the scorer answered nan, not a finite number")
    ]


def test_a_remote_scorer_that_does_not_start_is_an_error_and_closed(make_core: Make) -> None:
    config = {"scorer": "far", "arguments": {"at_start": ["no such model"]}}
    with pytest.raises(ScorerError, match="no such model"):
        make_core(**config)
    assert Far.seen == ["start far", "close far"]
    Far.seen.clear()
    validate(RewardConfig(**config))  # validation does not start scorers
    assert Far.seen == ["close far"]


# ---- invalid recipes ----


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"scorer": "exat"}, "reward.scorer 'exat' is unknown; did you mean exact?"),
        ({"scorer": "something"}, "module.path:function and path/to/file.py:function"),
        ({"arguments": {"ignore_cas": True}}, "reward.arguments.ignore_cas; did you mean reward.arguments.ignore_case"),
        ({"scorer": "surely.not.there:f"}, "reward.scorer surely.not.there:f: no module named surely.not.there"),
        ({"scorers": {"x": {"scorer": "sure.not:f"}}}, "reward.scorers.x.scorer sure.not:f: no module named sure"),
        ({"rubric": "absent.toml"}, "reward.rubric absent.toml: no such file"),
        ({"rubric": "bad.toml"}, "reward.rubric bad.toml: components[0].scorer 'exat' is unknown; did you mean exact?"),
        ({"rubric": "path.toml"}, "reward.rubric path.toml: surely.not:f: no module named surely"),
        ({"rubric": "picture.toml"}, "reward.rubric picture.toml is not text"),
        ({"rubric": "."}, "reward.rubric .: Is a directory"),
    ],
)
def test_unusable_recipes_are_refused_with_a_reason(
    config: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("[[components]]\nscorer = 'exat'\n")
    Path("path.toml").write_text("[[components]]\nscorer = 'surely.not:f'\n")
    Path("picture.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScorerError) as caught:
        validate(RewardConfig(**config))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_validation_imports_user_code_in_a_worker_only(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("import sys\nsys.tandem_was_here = True\ndef f(**everything):\n    return 1\n")
    rubric = validate(RewardConfig(scorer=f"{tmp_path}/loud.py:f"))
    assert [spec.scorer for spec in rubric.specs()] == [f"{tmp_path}/loud.py:f"]
    assert not hasattr(sys, "tandem_was_here")


def test_a_failed_construction_leaves_no_process(tmp_path: Path) -> None:
    # processes of earlier tests, which may end meanwhile
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(ScorerError):
        ScoringCore(RewardConfig(scorer="surely.not.there:f"))
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
