"""The scoring core: which scorers clients and recipes may name, including remote ones, and what is refused."""

from __future__ import annotations

import math
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.protos.contracts import Scored, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward import scoring
from tandem.reward.config import RewardConfig
from tandem.reward.rubric.rubric import Rubric
from tandem.reward.scoring import ScoringCore, validate
from tests.support.scoring_stand_ins import Far, Make, item, score

pytest_plugins = ("tests.support.scoring_cores",)
pytestmark = pytest.mark.usefixtures("stand_ins")

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
    for text, told in [
        (f"[[components]]\nscorer = '{functions}:compute_score'", "cannot name an import path"),
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
        (
            {"scorer": "exact", "arguments": {"ignore_cas": True}},
            "unknown key reward.arguments.ignore_cas; did you mean reward.arguments.ignore_case",
        ),
        (
            {"scorer": "exact", "arguments": {"ignore_case": "yes"}},
            "reward.arguments.ignore_case: should be true or false (got 'yes')",
        ),
        ({"scorer": "numeric", "arguments": {"tolerance": True}}, "reward.arguments.tolerance: should be a number"),
        ({"scorer": "numeric", "arguments": {"tolerance": -1}}, "reward.arguments.tolerance"),
        ({"scorer": "regex"}, "reward.arguments.pattern is missing"),
        (
            {"scorer": "regex", "arguments": {"pattern": "(1"}},
            "arguments.pattern: is not a regular expression: missing )",
        ),
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
