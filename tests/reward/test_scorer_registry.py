"""Descriptions and examples of every built-in scorer, and one-line errors for invalid arguments."""

from __future__ import annotations

import doctest
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from tandem.protos.contracts import Parameter, Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward import registry, scorers
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


def test_a_new_file_in_the_scorers_folder_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "always_half.py").write_text(
        "from tandem.protos.contracts import Scored\nfrom tandem.reward.contracts import Scorer\n"
        "class AlwaysHalf(Scorer):\n    VERSION = '1'\n    ISOLATION = 'in_process'\n"
        "    def judge(self, item):\n        return Scored(0.5)\n"
    )
    monkeypatch.setattr(scorers, "__path__", [*scorers.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "SCORERS", registry.ScorerRegistry())
    judge = make_judge("always_half", {})
    assert isinstance(judge, Judge) and judge.judge(ScoreItem("", "x", None)) == Scored(0.5)


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


@pytest.mark.usefixtures("with_everything")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "here.arguments.number is missing"),
        ({"number": "1"}, "here.arguments.number: should be a number (got '1')"),
        ({"number": True}, "here.arguments.number: should be a number (got True)"),
        ({"number": 1, "count": 1.0}, "here.arguments.count: should be an integer ≥ 1 (got 1.0)"),
        ({"number": 1, "count": True}, "should be an integer ≥ 1 (got True)"),
        ({"number": 1, "count": 0}, "here.arguments.count: should be an integer ≥ 1 (got 0)"),
        ({"number": 1, "text": 1}, "should be text (got 1)"),
        ({"number": 1, "flag": "yes"}, "should be true or false (got 'yes')"),
        ({"number": 1, "flag": 1}, "should be true or false (got 1)"),
        ({"number": 1, "mode": "strct"}, "here.arguments.mode: there is no 'strct'; did you mean strict?"),
        ({"number": 1, "words": "a"}, "should be a list of text (got 'a')"),
        ({"number": 1, "words": [1]}, "should be a list of text (got 1 in it)"),
        ({"number": 1, "pair": [1]}, "should be a list of 2 numbers (got"),
        ({"number": 1, "pair": [1, 2, 3]}, "should be a list of 2 numbers (got"),
        ({"number": 1, "many": ["1"]}, "should be a list of integers (got '1' in it)"),
        ({"number": 1, "table": {"a": "b"}}, "here.arguments.table.a: should be a table of numbers (got 'b' in it)"),
        ({"number": 1, "numbr": 1}, "unknown key here.arguments.numbr; did you mean here.arguments.number?"),
        ({"number": 1, "text": b"x"}, "here.arguments.text: Object of type bytes is not JSON serializable"),
    ],
)  # fmt: skip
def test_arguments_of_the_wrong_type_are_named_with_place_and_remedy(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ScorerError) as caught:
        make_scorer("everything", arguments, "here")
    assert told in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=200)
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


def test_a_spec_of_an_import_path_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("raise RuntimeError\n")
    spec = make_spec(f"{tmp_path}/loud.py:f", {"a": 1})
    assert (spec.isolation, spec.arguments) == ("worker", '{"a": 1}')


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
