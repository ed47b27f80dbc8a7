"""A user's function as scorer: verl's signatures, one answer or a batch, sync or async, and any result or exception."""

from __future__ import annotations

import hashlib
import math
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tandem.protos.contracts import Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.config import RewardConfig
from tandem.reward.registry import make_spec
from tandem.reward.scorers.exact import ExactMatch
from tandem.reward.scoring import ScoringCore
from tandem.reward.workers.function import (
    MAX_COMPONENTS,
    BatchFunctionJudge,
    CoroutineJudge,
    FunctionJudge,
    load_function,
    source_version,
    to_score,
)
from tests.support import scores
from tests.support.scores import refused

J = TypeVar("J")
item = partial(scores.item, ground_truth="1")


class _Scalar:
    """Behaves like a torch tensor of one element."""

    def item(self) -> float:
        return 0.5


class _Unprintable:
    """A user's class with a bug."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1, Scored(1.0)),
        (True, Scored(1.0)),
        (0.25, Scored(0.25)),
        (np.float32(0.5), Scored(0.5)),
        (np.bool_(True), Scored(1.0)),
        (np.array([0.5]), Scored(0.5)),
        (_Scalar(), Scored(0.5)),
        ({"score": 1, "acc": True, "pred": "x", "length": 3}, Scored(1.0, {"acc": 1.0, "length": 3.0})),
        ({"score": 0.5, "bad": math.nan}, Scored(0.5)),
        ({"score": 0.5, "odd\ud800": 1}, Scored(0.5, {"odd?": 1.0})),
    ],
)
def test_results_of_functions(result: Any, expected: Scored) -> None:
    assert to_score(result) == expected


MANY = {"score": 1.0, **{str(n): 1.0 for n in range(MAX_COMPONENTS + 1)}}
NO_NUMBERS = [math.nan, math.inf, None, "1", [1.0], {"acc": 1}, {"score": None}, np.array([1, 2]), 10**400, (1.0, {})]


@pytest.mark.parametrize("result", [*NO_NUMBERS, _Unprintable(), "\ud800", MANY])
def test_results_that_are_not_numbers_are_unscored(result: Any) -> None:
    reason, detail = refused(to_score(result))
    assert reason == "invalid_input" and detail.encode()  # it can be sent as UTF-8


FUNCTIONS = """
import asyncio
from pathlib import Path
import neighbour

class Odd(Exception):
    def __str__(self):
        raise ValueError

RAISED = {"raise": KeyError("nothing here"), "leave": SystemExit(1), "memory": MemoryError(), "odd": Odd(),
          "files": OSError(24, "Too many open files")}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str in RAISED:
        raise RAISED[solution_str]
    return {"score": float(solution_str == ground_truth), "bonus": neighbour.BONUS + extra_info.get("bonus", 0)}

async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    if solution_str == "raise":
        raise KeyError("later")
    return 0.5

def scaled(data_source, solution_str, ground_truth, extra_info, scale=1.0, **rest):
    return scale

def narrow(solution_str, ground_truth):
    return 0.0

def batch(data_sources, solution_strs, ground_truths, extra_infos, scale=1.0):
    if "raise" in solution_strs:
        raise KeyError("batch")
    if "short" in solution_strs:
        return [0.0]
    return (scale * (s == g) for s, g in zip(solution_strs, ground_truths))

async def batch_later(data_sources, solution_strs, ground_truths, extra_infos):
    async def one(text):
        await asyncio.sleep(0)
        return {"score": len(text), "seen": len(solution_strs)}
    return await asyncio.gather(*map(one, solution_strs))

def narrow_batch(solution_strs, data_sources):
    return []
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("BONUS = 2\n")
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def loaded(kind: type[J], path: str, **arguments: Any) -> J:
    judge = load_function(path, arguments)
    assert isinstance(judge, kind)
    return judge


batch = partial(loaded, BatchFunctionJudge)


def test_a_function_is_called_with_verls_arguments(functions: Path) -> None:
    judge = loaded(FunctionJudge, f"{functions}:compute_score")
    assert judge.judge(ScoreItem("d", "1", "1", {"bonus": 1})) == Scored(1.0, {"bonus": 3.0})
    assert judge.judge(item("raise")) == Unscored("crashed", "KeyError: 'nothing here' (functions.py:15)")
    assert refused(judge.judge(item("leave")))[0] == "crashed"
    assert refused(judge.judge(item("odd")))[1].startswith("Odd: (without a message)")
    assert refused(judge.judge(item("files")))[0] == "limit"
    with pytest.raises(MemoryError):  # the process handles it
        judge.judge(item("memory"))
    assert loaded(FunctionJudge, f"{functions}:scaled", scale=3, more=1).judge(item("1")) == Scored(3.0)


def test_coroutine_functions(functions: Path) -> None:
    judge = loaded(CoroutineJudge, f"{functions}:later")
    fine, raised = judge.judge_batch([item("1"), item("raise")])
    assert fine == Scored(0.5) and raised == Unscored("crashed", "KeyError: 'later' (functions.py:21)")
    assert batch(f"{functions}:batch_later").judge_batch([item("a"), item("bc")]) == [
        Scored(1.0, {"seen": 2.0}),
        Scored(2.0, {"seen": 2.0}),
    ]


def test_coroutines_run_concurrently_and_time_out_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text(
        "import asyncio\n"
        "here = []\n"
        "async def meet(data_source, solution_str, ground_truth, extra_info):\n"
        "    here.append(solution_str)\n"
        "    while len(here) < 3 or solution_str == 'never':\n"
        "        await asyncio.sleep(0.01)\n"
        "    return {'score': 1.0, 'loop': id(asyncio.get_running_loop())}\n"
    )
    judge = loaded(CoroutineJudge, f"{tmp_path}/meet.py:meet")
    first, never, last = replace(judge, seconds=1.5).judge_batch([item("a"), item("never"), item("b")])
    assert isinstance(first, Scored) and isinstance(last, Scored) and first.value == last.value == 1.0
    assert never == Unscored("timeout", "no answer within 1.5 s")
    (again,) = judge.judge_batch([item("c")])
    assert isinstance(again, Scored) and again.breakdown == first.breakdown, "the loop is the same for all calls"


def test_a_batch_function_is_called_with_verls_plural_arguments(functions: Path) -> None:
    judge = batch(f"{functions}:batch", scale=2.0)
    assert judge.judge_batch([item("1"), item("2"), item("1")]) == [Scored(2.0), Scored(0.0), Scored(2.0)]
    assert judge.judge_batch([]) == []
    told = Unscored("crashed", "the function returned 1 results for 2 answers")
    assert judge.judge_batch([item("1"), item("short")]) == [told] * 2


def test_an_error_in_a_batch_affects_only_the_item_that_causes_it(functions: Path) -> None:
    judge = batch(f"{functions}:batch")
    texts = ["1", "1", "raise", "0", "1", "raise", "1"]
    judged = judge.judge_batch([item(text) for text in texts])
    for text, score in zip(texts, judged, strict=True):
        if text == "raise":
            reason, detail = refused(score)
            assert reason == "crashed" and "KeyError: 'batch'" in detail
        else:
            assert score == Scored(float(text == "1"))


@pytest.mark.parametrize(
    ("path", "arguments", "told"),
    [
        ("{here}/functions.py:absent", {}, "has no function absent; it has compute_score, later, scaled, narrow"),
        ("{here}/functions.py:compute_score", {"scale": 2}, "unexpected keyword argument 'scale'"),
        ("{here}/functions.py:narrow", {}, "called with data_source, solution_str, ground_truth, extra_info"),
        ("{here}/functions.py:narrow_batch", {}, "called with data_sources, solution_strs, ground_truths, extra_infos"),
        ("{here}/functions.py:batch", {"size": 2}, "unexpected keyword argument 'size'"),
        ("{here}/absent.py:f", {}, "absent.py is no file"),
        ("{here}/broken.py:f", {}, "does not import: SyntaxError"),
        ("{here}/lacking.py:f", {}, "does not import: ModuleNotFoundError: No module named 'surely_not_there'"),
        ("{here}/leaving.py:f", {}, "does not import: SystemExit: 3"),
        ("surely.not.there:f", {}, "no module named surely.not.there"),
        ("tandem.reward.workers.function:nothing", {}, "has no function nothing"),
    ],
)
def test_functions_that_cannot_be_loaded(functions: Path, path: str, arguments: dict[str, Any], told: str) -> None:
    (functions.parent / "broken.py").write_text("def f(:\n")
    (functions.parent / "lacking.py").write_text("import surely_not_there\n")
    (functions.parent / "leaving.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ScorerError) as caught:
        load_function(path.format(here=functions.parent), arguments)
    assert told in str(caught.value) and "\n" not in str(caught.value)


# ---- versions ----


def test_the_version_is_a_digest_of_the_file_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"raise SystemExit('imported')\n"
    (tmp_path / "house" / "rules").mkdir(parents=True)
    (tmp_path / "house" / "score.py").write_bytes(text)
    (tmp_path / "house" / "rules" / "__init__.py").write_bytes(text + b"#")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "far_score.py").write_bytes(text)
    monkeypatch.chdir(tmp_path)  # the first folder that workers search
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    version = hashlib.sha256(text).hexdigest()[:12]
    for path in ("house/score.py:f", f"{tmp_path}/house/score.py:f", "house.score:f", "house.score:g", "far_score:f"):
        spec = make_spec(path, {"a": 1})
        assert (spec.isolation, spec.arguments) == ("worker", '{"a": 1}')
        assert source_version(path) == spec.version == version, path
    assert source_version("house.rules:f") == hashlib.sha256(text + b"#").hexdigest()[:12]
    assert source_version("no/such.py:f") == source_version("house.no:f") == source_version("house:f") == ""
    assert make_spec("exact", {}).version == ExactMatch.VERSION


def test_a_changed_file_changes_version_and_digest(tmp_path: Path) -> None:
    """Jobs bind to a `digest`, so a job of one version is not scored by another; ListScorers shows the version."""
    file = tmp_path / "score.py"
    config = RewardConfig.model_validate({"scorers": {"mine": {"scorer": f"{file}:f"}}})
    seen = set()
    for value in ("1.0", "2.0"):
        file.write_text(f"def f(**item):\n    return {value}\n")
        with closing(ScoringCore(config)) as core:
            (mine,) = [info for info in core.scorers() if info.name == "mine"]
            digest = core.compile("[[components]]\nscorer = 'mine'\n").digest
            assert mine.version == hashlib.sha256(file.read_bytes()).hexdigest()[:12]
            seen.add((mine.version, digest))
    assert len({version for version, _ in seen}) == len({digest for _, digest in seen}) == 2
