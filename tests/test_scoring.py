"""The one worker core: every kind of scorer by one rubric, what runs where, what is kept, and what a failure costs."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.contracts import Score, Scored, ScoreItem, Unscored
from protos.errors import ScorerError
from reward import scoring
from reward.config import RewardConfig
from reward.contracts import Isolation
from reward.exact import ExactMatch
from reward.lanes import Lane
from reward.registry import BUILT_IN
from reward.rubric import Rubric
from reward.scoring import CompiledRubric, ScoringCore, validate

Make = Callable[..., ScoringCore]


@pytest.fixture
def make_core() -> Iterator[Make]:
    cores: list[ScoringCore] = []

    def make(**config: Any) -> ScoringCore:
        cores.append(ScoringCore(RewardConfig(**config)))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


def item(solution: str, truth: Any = "1", source: str = "d", group: str = "") -> ScoreItem:
    return ScoreItem(source, solution, truth, {}, group)


def score(core: ScoringCore, rubric: CompiledRubric, *items: ScoreItem) -> list[Score]:
    return core.score(rubric, items, "calls")


FUNCTIONS = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info, log=""):
    if log:
        open(log, "a").write(solution_str + "\\n")
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "die":
        os._exit(9)
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth}
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


@dataclass(frozen=True, slots=True)
class Far:
    """A stand-in for a remote scorer; what happens to it is written down."""

    VERSION: ClassVar[str] = "1"
    ISOLATION: ClassVar[Isolation] = "remote"
    seen: ClassVar[list[str]] = []
    meeting: ClassVar[threading.Barrier | None] = None
    name: str = "far"
    value: float = 1.0
    at_start: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.seen.append(f"start {self.name}")
        if self.at_start:
            raise ScorerError(self.at_start[0])

    def judge_batch(self, items: Sequence[ScoreItem], *, lane: Lane = "calls") -> list[Score]:
        if self.meeting is not None:
            self.meeting.wait(timeout=30.0)
        self.seen.append(f"judge {self.name} {len(items)}")
        return [Unscored("limit", "spent") if one.solution == "costly" else Scored(self.value) for one in items]

    def close(self) -> None:
        self.seen.append(f"close {self.name}")

    def figures(self) -> dict[str, float]:
        return {f"spent_{self.name}": 0.5}


@dataclass(frozen=True, slots=True)
class Rank:
    """A stand-in for a scorer that compares the items of a group: the share of its group that is shorter."""

    VERSION: ClassVar[str] = "1"
    ISOLATION: ClassVar[Isolation] = "in_process"
    GROUPED: ClassVar[bool] = True

    def judge_batch(self, items: Sequence[ScoreItem]) -> list[Score]:
        groups = {one.group: [len(other.solution) for other in items if other.group == one.group] for one in items}
        return [Scored(float(sum(n < len(one.solution) for n in groups[one.group]))) for one in items]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "far", Far)
    monkeypatch.setitem(BUILT_IN, "rank", Rank)
    monkeypatch.setattr(Far, "seen", [])
    monkeypatch.setattr(Far, "meeting", None)


# ---- a scorer alone ----


def test_a_cheap_scorer_alone_starts_nothing_and_is_asked_directly(make_core: Make) -> None:
    before = psutil.Process().children()
    core = make_core(scorer="numeric", arguments={"tolerance": 0.2})
    assert core.default.in_process and core.default.sole is not None and core.default.num_callers == 1
    assert score(core, core.default, item("5", "6"), item("4", "6")) == [Scored(1.0), Scored(0.0)]
    assert psutil.Process().children() == before and core.replaced_workers == 0
    assert score(core, core.default) == []


def test_a_function_alone_keeps_its_own_breakdown(make_core: Make, functions: Path) -> None:
    core = make_core(scorer=f"{functions}:compute_score", num_workers=2, timeout_seconds=1.0)
    assert not core.default.in_process and core.default.num_callers == 2
    scores = score(core, core.default, item("1"), item("hang"), item("die"), item("2"))
    assert [scores[0], scores[3]] == [Scored(1.0, {"acc": 1.0}), Scored(0.0, {"acc": 0.0})]
    assert [one.reason for one in scores[1:3] if isinstance(one, Unscored)] == ["timeout", "crashed"]
    assert core.replaced_workers == core.figures()["workers_replaced"] == 2


def test_a_pattern_that_never_ends_is_a_timeout(make_core: Make) -> None:
    core = make_core(scorer="regex", arguments={"pattern": "(a+)+$"}, timeout_seconds=0.5)
    scores = score(core, core.default, item("a" * 60 + "b", "a"), item("baa", "aa"))
    assert scores == [Unscored("timeout", "no answer within 0.5 s"), Scored(1.0)]


# ---- rubrics ----


@pytest.fixture
def mixed(tmp_path: Path, functions: Path) -> Path:
    """A gate in a worker, a cheap scorer for one source, a user's function for the others, and what is only reported."""
    log = tmp_path / "judged"
    log.touch()
    file = tmp_path / "rubric.toml"
    file.write_text(f"""
[[components]]
name = "format"
scorer = "regex"
arguments = {{ pattern = "^[0-9a-z]+$", compare = false }}
gate = true
weight = 0.5
[[components]]
scorer = "numeric"
data_sources = ["numbers*"]
[[components]]
scorer = "{functions}:compute_score"
arguments = {{ log = "{log}" }}
data_sources = ["words*"]
weight = 2.0
[[components]]
name = "same"
scorer = "exact"
weight = 0
""")
    return file


def test_one_rubric_with_every_kind(make_core: Make, mixed: Path) -> None:
    core = make_core(rubric=str(mixed), num_workers=2, timeout_seconds=1.0)
    items = [
        item("1", "1", "numbers/a"),
        item("1", "1", "words"),
        item("not so", "1", "words"),
        item("die", "1", "words"),
        item("3", "1", "others"),
    ]
    scores = score(core, core.default, *items)
    assert scores[0] == Scored(1.5, {"format": 1.0, "numeric": 1.0, "same": 1.0})
    assert scores[1] == Scored(2.5, {"format": 1.0, "compute_score": 1.0, "compute_score/acc": 1.0, "same": 1.0})
    assert scores[2] == Scored(0.0, {"format": 0.0, "compute_score": 0.0, "same": 0.0})
    assert scores[3] == Unscored("crashed", "compute_score: the scoring process exited with code 9")
    assert scores[4] == Scored(0.5, {"format": 1.0, "same": 0.0})
    judged = (mixed.parent / "judged").read_text().split("\n")
    assert sorted(filter(None, judged)) == ["1", "die"], "what did not pass the gate was not run"


def test_the_order_of_many_items(make_core: Make, mixed: Path) -> None:
    core = make_core(rubric=str(mixed), num_workers=2)
    items = [item(str(n), str(n + n % 3), ("words", "numbers", "x")[n % 3]) for n in range(600)]
    for n, one in enumerate(score(core, core.default, *items)):
        weight = {0: 2.0, 1: 0.0, 2: 0.0}[n % 3]  # words are right where n % 3 is 0, the others are never
        assert isinstance(one, Scored) and one.value == 0.5 + weight, n


def test_optional_components_are_left_out(make_core: Make) -> None:
    core = make_core(scorers={"costly": {"scorer": "far", "arguments": {"value": 0.25}}})
    text = "[[components]]\nscorer = 'exact'\n[[components]]\nscorer = 'costly'\n"
    needed, optional = core.compile(text), core.compile(text + "optional = true")
    items = item("1"), item("costly")
    assert score(core, needed, *items) == [
        Scored(1.25, {"exact": 1.0, "costly": 0.25}),
        Unscored("limit", "costly: spent"),
    ]
    assert score(core, optional, *items)[1] == Scored(0.0, {"exact": 0.0})


def test_rubrics_within_rubrics(make_core: Make, mixed: Path) -> None:
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
    assert right == Scored(
        2.0,
        {
            "inner": 2.0,
            "inner/exact": 1.0,
            "inner/regex": 1.0,
            "twice": 1.0,
            "twice/exact": 1.0,
            "twice/regex": 1.0,
        },
    )
    assert isinstance(wrong, Scored) and wrong.value == 0.0


def test_what_compares_groups_gets_them_whole(make_core: Make) -> None:
    core = make_core()
    rubric = core.compile("[[components]]\nscorer = 'rank'\n")
    assert rubric.grouped and rubric.in_process and not core.default.grouped
    items = [item("a" * n, group=group) for n, group in [(1, "x"), (3, "y"), (2, "x"), (1, "y"), (3, "x")]]
    assert [one.value for one in score(core, rubric, *items) if isinstance(one, Scored)] == [0, 1, 1, 0, 2]


texts = st.text(alphabet="01ab .", max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(texts, texts, st.sampled_from(["m", "n", ""])), max_size=6),
    st.booleans(),
    st.sampled_from([None, ["m"], ["n", "m*"]]),
)
def test_the_core_does_what_the_rubric_says(
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


# ---- what clients may bring ----


def test_a_clients_rubric_is_kept_by_its_text(make_core: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    text = "[[components]]\nscorer = 'numeric'\n"
    assert core.compile(text) is core.compile(text) is not core.compile(text + "weight = 2")
    assert core.compile("") is core.default
    monkeypatch.setattr(scoring, "MAX_RUBRICS", 2)
    first = core.compile(text)
    for weight in range(3):
        core.compile(text + f"weight = {weight}")
    assert core.compile(text) is not first and core.compile(text).digest == first.digest


def test_clients_use_declared_names(make_core: Make, functions: Path) -> None:
    core = make_core(
        scorers={
            "mine": {"scorer": f"{functions}:compute_score"},
            "near": {"scorer": "far", "arguments": {"name": "n"}},
        }
    )
    assert Far.seen == ["start n"]
    rubric = core.compile("[[components]]\nscorer = 'mine'\n[[components]]\nscorer = 'near'\n")
    assert score(core, rubric, item("1")) == [Scored(2.0, {"mine": 1.0, "mine/acc": 1.0, "near": 1.0})]
    infos = {info.name: info for info in core.scorers()}
    assert (infos["mine"].isolation, infos["near"].isolation) == ("worker", "remote")
    assert "far" not in infos and infos["exact"].parameters and not infos["near"].parameters
    for text, told in [
        (f"[[components]]\nscorer = '{functions}:compute_score'", "no import path"),
        ("[[components]]\nscorer = 'far'", "reward.scorers"),
        ("[[components]]\nscorer = 'mien'", "did you mean mine?"),
    ]:
        with pytest.raises(ScorerError, match=told):
            core.compile(text)


def test_the_default_can_be_asked_for_as_a_rubric(make_core: Make, mixed: Path) -> None:
    core = make_core(scorer="regex", arguments={"pattern": "a\"\\d+'"})
    again = Rubric.parse(core.default.text, allowed=core._clients)
    assert [spec.key for spec in again.specs()] == [spec.key for spec in core.default.rubric.specs()]
    assert make_core(rubric=str(mixed)).default.text == mixed.read_text()


# ---- remote ----


def test_remote_scorers_of_one_rubric_wait_at_the_same_time(make_core: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a", "b", "c"]
    core = make_core(scorers={name: {"scorer": "far", "arguments": {"name": name}} for name in names})
    rubric = core.compile("".join(f"[[components]]\nscorer = '{name}'\n" for name in names))
    assert rubric.num_callers > 1 and not rubric.in_process
    monkeypatch.setattr(Far, "meeting", threading.Barrier(3))  # broken unless all three are there
    assert score(core, rubric, item("x"), item("y")) == [Scored(3.0, dict.fromkeys(names, 1.0))] * 2
    assert core.figures()["spent_b:b"] == 0.5
    core.close()
    assert sorted(one for one in Far.seen if one.startswith("close")) == ["close a", "close b", "close c"]


def test_a_remote_number_that_is_none(make_core: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(scorer="far")
    monkeypatch.setattr(Far, "judge_batch", lambda self, items, lane: [Scored(math.nan) for _ in items])
    assert score(core, core.default, item("x")) == [
        Unscored("infrastructure", "the scorer answered nan, not a finite number")
    ]


def test_a_remote_scorer_that_does_not_start_is_told_at_once_and_closed(make_core: Make) -> None:
    config = {"scorer": "far", "arguments": {"at_start": ["no such model"]}}
    with pytest.raises(ScorerError, match="no such model"):
        make_core(**config)
    assert Far.seen == ["start far", "close far"]
    Far.seen.clear()
    validate(RewardConfig(**config))  # what is only checked is not started
    assert Far.seen == ["close far"]


# ---- bad recipes ----


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"scorer": "exat"}, "reward.scorer 'exat' is unknown; did you mean exact?"),
        ({"scorer": "something"}, "module.path:function and path/to/file.py:function"),
        (
            {"scorer": "exact", "arguments": {"ignore_cas": True}},
            "reward.arguments.ignore_cas: scorer exact has no such",
        ),
        ({"scorer": "exact", "arguments": {"ignore_case": "yes"}}, "needs true or false there, got 'yes'"),
        ({"scorer": "numeric", "arguments": {"tolerance": True}}, "needs a number there"),
        ({"scorer": "numeric", "arguments": {"tolerance": -1}}, "tolerance must be finite and at least 0"),
        ({"scorer": "regex"}, "reward.arguments.pattern is missing"),
        ({"scorer": "regex", "arguments": {"pattern": "(1"}}, "pattern '(1' is not a regular expression: missing )"),
        ({"scorer": "surely.not.there:f"}, "reward.scorer surely.not.there:f: no module named surely.not.there"),
        (
            {"scorers": {"x": {"scorer": "surely.not:f"}}},
            "reward.scorers.x.scorer surely.not:f: no module named surely",
        ),
        ({"rubric": "absent.toml"}, "reward.rubric absent.toml: no such file"),
        ({"rubric": "bad.toml"}, "reward.rubric bad.toml: components[0].scorer 'exat' is unknown; did you mean exact?"),
        ({"rubric": "path.toml"}, "reward.rubric path.toml: surely.not:f: no module named surely"),
        ({"rubric": "picture.toml"}, "reward.rubric picture.toml is not text"),
        ({"rubric": "."}, "reward.rubric .: Is a directory"),
    ],
)
def test_recipes_that_cannot_be_scored(
    config: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("[[components]]\nscorer = 'exat'\n")
    Path("path.toml").write_text("[[components]]\nscorer = 'surely.not:f'\n")
    Path("picture.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScorerError) as caught:
        validate(RewardConfig(**config))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_validation_leaves_user_code_out_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("import sys\nsys.tandem_was_here = True\ndef f(**everything):\n    return 1\n")
    rubric = validate(RewardConfig(scorer=f"{tmp_path}/loud.py:f"))
    assert [spec.scorer for spec in rubric.specs()] == [f"{tmp_path}/loud.py:f"]
    assert not hasattr(sys, "tandem_was_here")


def test_a_core_that_cannot_be_built_leaves_no_process(tmp_path: Path) -> None:
    before = {
        child.pid for child in psutil.Process().children(recursive=True)
    }  # of earlier tests; they may end meanwhile
    with pytest.raises(ScorerError):
        ScoringCore(RewardConfig(scorer="surely.not.there:f"))
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


# ---- the end ----


def test_closing_ends_calls_under_way(make_core: Make, functions: Path) -> None:
    core = make_core(scorer=f"{functions}:compute_score", timeout_seconds=600.0)
    found: list[Score] = []
    caller = threading.Thread(target=lambda: found.extend(score(core, core.default, item("hang"))))
    caller.start()
    while core.figures()["calls_waiting_calls"] or not psutil.Process().children(recursive=True):
        pass
    assert not core.closing
    core.close()
    caller.join(timeout=30.0)
    assert core.closing and found == [pool_closing()]
    assert score(core, core.default, item("1")) == [pool_closing()]
    core.close()  # once more does no harm


def pool_closing() -> Unscored:
    return Unscored("infrastructure", "the scorer is closing")


def test_many_threads_and_rubrics_at_once(make_core: Make, mixed: Path) -> None:
    core = make_core(rubric=str(mixed), num_workers=2)
    other = core.compile(
        "[[components]]\nscorer = 'exact'\n[[components]]\nscorer = 'regex'\narguments = {pattern='(.)'}\n"
    )
    failures: list[BaseException] = []

    def call(number: int) -> None:
        try:
            for n in range(10):
                text = str((n + number) % 2)
                right = float(text == "1")
                assert score(core, other, item(text)) == [Scored(2 * right, {"exact": right, "regex": right})]
                assert score(core, core.default, item(text, "1", "numbers")) == [
                    Scored(0.5 + right, {"format": 1.0, "numeric": right, "same": right})
                ]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
    assert not failures and not any(thread.is_alive() for thread in threads)
