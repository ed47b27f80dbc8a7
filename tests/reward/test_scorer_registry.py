"""Descriptions and examples of every built-in scorer, and one-line errors for invalid arguments."""

from __future__ import annotations

import doctest
import inspect
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from tandem.protos.contracts import Parameter, Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.contracts import BatchJudge, Isolation, Judge, Scorer
from tandem.reward.registry import SCORERS, describe, make_judge, make_scorer, make_spec
from tests.support.processes import run_python


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_follows_the_contract(name: str) -> None:
    kind = SCORERS[name]
    assert issubclass(kind, Scorer) and kind.model_config["frozen"] and kind.model_config["extra"] == "forbid"
    assert kind.VERSION and kind.ISOLATION in get_args(Isolation)
    assert issubclass(kind, Judge) != issubclass(kind, BatchJudge) or name == "code"
    if kind.ISOLATION == "remote":
        assert issubclass(kind, BatchJudge)
        assert inspect.signature(kind.judge_batch).parameters["priority"].kind is inspect.Parameter.KEYWORD_ONLY
    assert set(kind.RECIPE_ONLY) <= set(kind.model_fields)


@pytest.mark.parametrize("name", SCORERS)
def test_the_docstring_examples_of_a_scorer_run(name: str) -> None:
    kind = SCORERS[name]
    known = {**vars(inspect.getmodule(kind)), "ScoreItem": ScoreItem, "Scored": Scored, "Unscored": Unscored}
    found = doctest.DocTestFinder(recurse=False).find(kind, name, globs=known)
    assert sum(len(test.examples) for test in found) > 0, "it has no example"
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in found:
        runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_every_scorer_and_parameter_is_described() -> None:
    infos = describe()
    assert [info.name for info in infos] == list(SCORERS) == sorted(SCORERS)
    for info in infos:
        assert info.summary and "\n" not in info.summary
        for parameter in info.parameters:
            assert parameter.type and parameter.description, f"{info.name}.{parameter.name}"
            if parameter.default:
                json.loads(parameter.default)
    numeric = next(info for info in infos if info.name == "numeric")
    assert numeric.isolation == "in_process" and numeric.version
    described = "Largest accepted difference, relative to the ground truth if that is above 1."
    assert numeric.parameters[0] == Parameter("tolerance", "number ≥ 0.0", "1e-6", described)
    assert [p.default for info in infos if info.name == "regex" for p in info.parameters if p.name == "pattern"] == [""]


class Everything(Scorer):
    """A scorer with a parameter of every type."""

    VERSION = "1"
    ISOLATION = "in_process"
    number: float
    count: Annotated[int, Field(ge=1)] = 1
    text: str = ""
    flag: bool = False
    mode: Literal["strict", "loose"] = "strict"
    words: list[str] | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    many: tuple[int, ...] = ()
    table: Mapping[str, float] | None = None

    def judge(self, item: ScoreItem) -> Scored:
        return Scored(self.number)


@pytest.fixture
def with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCORERS.loaders, "everything", lambda: Everything)


@pytest.mark.usefixtures("with_everything")
def test_arguments_of_every_type_are_read() -> None:
    alike: dict[str, Any] = {"count": 2, "text": "x", "flag": True, "mode": "loose", "words": ["a"]}
    judge = make_judge("everything", {**alike, "number": 1, "pair": [1, 2.5], "many": [1, 2, 3], "table": {"a": 1}})
    assert judge == Everything(**alike, number=1.0, pair=(1.0, 2.5), many=(1, 2, 3), table={"a": 1.0})
    assert isinstance(judge, Everything) and type(judge.number) is float


@settings(max_examples=100)
@given(
    st.sampled_from(sorted(SCORERS)),
    st.dictionaries(
        st.text(max_size=8) | st.sampled_from(["tolerance", "pattern", "choices", "n"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), st.lists, max_leaves=4
        ),
        max_size=3,
    ),
)
def test_any_arguments_are_accepted_or_refused_in_one_line(name: str, arguments: dict[str, Any]) -> None:
    try:
        make_scorer(name, arguments, "reward")
    except ScorerError as error:
        assert len(str(error).splitlines()) == 1
        assert str(error).removeprefix("unknown key ").startswith("reward.arguments")


def test_a_scorer_is_imported_when_it_is_asked_for() -> None:
    heavy = ["torch", "transformers", "sympy", "math_verify", "numpy", "httpx", "aiohttp", "jsonschema", "openai"]
    code = (
        "import sys\nfrom tandem.reward.registry import SCORERS, make_spec\nlist(SCORERS), make_spec('exact', {})\n"
        f"loaded = {{name for name in sys.modules if name.startswith('tandem.reward.scorers.')}}\n"
        "assert loaded == {'tandem.reward.scorers.exact'}, loaded\n"
        f"list(SCORERS.values()), make_spec('math_verify', {{}})\nprint(*({{'grpc', *{heavy!r}}} & set(sys.modules)))"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


# ---- arguments that a scorer refuses ----

CHAT = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}
GIVEN = {"judge": CHAT, "pairwise": CHAT, "remote": {"url": "http://127.0.0.1:1/"}}

REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "everything": [
        ({}, "reward.arguments.number is missing"),
        ({"number": "1"}, "reward.arguments.number: should be a number (got '1')"),
        ({"number": True}, "reward.arguments.number: should be a number (got True)"),
        ({"number": 1, "count": 1.0}, "reward.arguments.count: should be an integer ≥ 1 (got 1.0)"),
        ({"number": 1, "count": True}, "should be an integer ≥ 1 (got True)"),
        ({"number": 1, "count": 0}, "reward.arguments.count: should be an integer ≥ 1 (got 0)"),
        ({"number": 1, "text": 1}, "should be text (got 1)"),
        ({"number": 1, "flag": "yes"}, "should be true or false (got 'yes')"),
        ({"number": 1, "flag": 1}, "should be true or false (got 1)"),
        ({"number": 1, "mode": "strct"}, "reward.arguments.mode: there is no 'strct'; did you mean strict?"),
        ({"number": 1, "words": "a"}, "should be a list of text (got 'a')"),
        ({"number": 1, "words": [1]}, "should be a list of text (got 1 in it)"),
        ({"number": 1, "pair": [1]}, "should be a list of 2 numbers (got"),
        ({"number": 1, "pair": [1, 2, 3]}, "should be a list of 2 numbers (got"),
        ({"number": 1, "many": ["1"]}, "should be a list of integers (got '1' in it)"),
        ({"number": 1, "table": {"a": "b"}}, "reward.arguments.table.a: should be a table of numbers (got 'b' in it)"),
        ({"number": 1, "numbr": 1}, "unknown key reward.arguments.numbr; did you mean reward.arguments.number?"),
        ({"number": 1, "text": b"x"}, "reward.arguments.text: Object of type bytes is not JSON serializable"),
    ],
    "judge": [
        ({"base_url": "127.0.0.1:8000"}, "base_url '127.0.0.1:8000' is no http:// or https:// URL"),
        ({"base_url": "file:///etc/passwd"}, "is no http://"),
        ({"base_url": "http://[::1"}, "is no http://"),
        ({"base_url": "http://me:pw@host/v1"}, "holds credentials"),
        ({"model": ""}, "arguments.model"),
        ({"api_key_env": "SURELY_NOT_SET"}, "environment variable SURELY_NOT_SET is not set"),
        ({"votes": 3}, "votes at temperature 0"),
        ({"votes": 17, "temperature": 1.0}, "votes must be at most max_concurrent"),
        ({"temperature": 3.0}, "temperature must be"),
        ({"temperature": "hot"}, "arguments.temperature: should be a number (got 'hot')"),
        ({"combine": "mode"}, "arguments.combine: there is no 'mode'"),
        ({"max_attempts": 0}, "arguments.max_attempts"),
        ({"deadline_seconds": 0.0}, "arguments.deadline_seconds"),
        ({"requests_per_minute": 1, "deadline_seconds": 30.0}, "wait longer than deadline_seconds"),
        ({"requests_per_minute": -1}, "arguments.requests_per_minute"),
        ({"max_spend": 1.0}, "max_spend needs prompt_price"),
        ({"extra_body": {"stream": True}}, "extra_body must not hold stream"),
        ({"template": "{question}"}, "template: it lacks {answer}"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"lowest": 1.0, "highest": 1.0}, "lowest 1 must be below highest 1"),
        ({"score_key": ""}, "set pattern or score_key"),
        ({"base_ur": "x"}, "did you mean reward.arguments.base_url?"),
    ],
    "pairwise": [
        ({"template": "{answer_a}"}, "template: it lacks {answer_b}"),
        ({"template": "{answer_a} {answer_b} {qestion}"}, "did you mean {question}"),
        ({"tie": "a"}, "a_wins, b_wins and tie must differ"),
        ({"opponents": -1}, "arguments.opponents"),
    ],
    "remote": [
        ({"url": "unix:/x"}, "url 'unix:/x' is no http:// or https:// URL"),
        ({"batch_size": 0}, "arguments.batch_size"),
        ({"batch_size": 2, "items_key": ""}, "batch_size above 1 needs items_key"),
        ({"fields": {"code": "answer"}}, "fields.code: 'answer' is none of data_source, solution"),
        ({"fields": {"code": "solution.x"}}, "fields.code"),
        ({"constants": {"group": 1}}, "constants.group is also a field of the item"),
        ({"labels": {"a": "b"}}, "arguments.labels"),
        ({"score_path": ""}, "arguments.score_path"),
        ({"deadline_seconds": 0}, "arguments.deadline_seconds"),
        ({"api_key_env": "SURELY_NOT_SET"}, "SURELY_NOT_SET is not set"),
    ],
    "group_rank": [
        ({"scorer": "numerc"}, "scorer 'numerc' is unknown"),
        ({"scorer": "regex", "arguments": {"pattern": "x"}}, "scorer 'regex' needs a worker process"),
        ({"scorer": "pairwise"}, "scorer 'pairwise' compares groups itself"),
        ({"scorer": "numeric", "arguments": {"tolerance": -1}}, "tolerance"),
    ],
    "reward_model": [
        ({"path": "/nowhere"}, "path /nowhere is not a folder with a config.json"),
        ({"path": "org/model"}, "path org/model is not a folder"),
        ({"label": -1}, "arguments.label"),
        ({"max_batch_tokens": 0}, "arguments.max_batch_tokens"),
        ({"timeout_seconds": 0}, "arguments.timeout_seconds"),
        ({"dtype": "int8"}, "arguments.dtype"),
    ],
    "code": [
        ({"tolerance": -1.0}, "tolerance"),
        ({"tolerance": math.inf}, "tolerance"),
        ({"max_tests": -1}, "max_tests"),
        ({"seconds_per_test": 0.0}, "seconds_per_test"),
        ({"seconds_per_test": 61.0}, "seconds_per_test"),
        ({"seconds_per_answer": math.inf}, "seconds_per_answer"),
        ({"memory_bytes": 1 << 20}, "memory_bytes"),
    ],
    "gsm8k": [({"last_characters": -1}, "last_characters")],
    "math_verify": [({"float_rounding": 16}, "float_rounding")],
    "tags": [
        ({"order": []}, "must name a tag"),
        ({"order": ["a", "a"]}, "named twice"),
        ({"order": ["<a>"]}, "is not the name of a tag"),
        ({"counts": {"search": [3, 2]}}, "fewest, most"),
    ],
    "format": [
        ({"order": []}, "must be given"),
        ({"parts": {"a": "."}}, "parts.a: order has no a, but think, answer"),
        ({"parts": {"answer": "("}}, "arguments.parts.answer: is not a regular expression"),
        ({"pattern": "["}, "arguments.pattern: is not a regular expression"),
    ],
    "multiple_choice": [
        ({"choices": "A"}, "two different letters"),
        ({"choices": "Aa"}, "two different letters"),
        ({"choices": "A]"}, "ASCII letters or digits"),
    ],
    "short_answer": [({"tag": "<answer>"}, "is not the name of a tag"), ({"max_tags": -1}, "max_tags")],
    "overlong": [
        ({"max_length": 5, "buffer": 6}, "buffer"),
        ({"max_length": 5, "buffer": 5, "factor": math.inf}, "factor"),
    ],
    "target_length": [({"target": -1}, "target"), ({"slope": 0.0}, "slope")],
    "repetition": [({"n": 0}, "arguments.n"), ({"penalty": -1.0}, "penalty")],
    "language": [({"language": "tlh"}, "'tlh' is unknown"), ({"scripts": ["Klingon"]}, "'Klingon' is unknown")],
    "json_schema": [
        ({"schema": "{"}, "schema is no JSON"),
        ({"schema": '{"type": "sandwich"}'}, "schema is no valid schema"),
    ],
}


@pytest.mark.usefixtures("with_everything")
@pytest.mark.parametrize(
    ("scorer", "wrong", "told"), [(scorer, *case) for scorer, cases in REFUSED.items() for case in cases]
)
def test_invalid_arguments_are_refused_in_one_line(
    tmp_path: Path, scorer: str, wrong: dict[str, Any], told: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = {"path": str(tmp_path)} if scorer == "reward_model" else GIVEN.get(scorer, {})
    with pytest.raises(ScorerError) as caught:
        make_spec(scorer, {**given, **wrong})
    assert told in str(caught.value) and "\n" not in str(caught.value)
