"""Tools: schemas of functions, verl's files, and the environment that executes the calls of a turn."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.protos.contracts import Message, StepResult
from tandem.protos.errors import ConfigError
from tandem.rollout.environments.config import TOOL_ENVIRONMENT, EnvironmentConfig
from tandem.rollout.environments.loading import ContractError
from tandem.rollout.environments.process import check_class
from tandem.rollout.environments.tools.environment import ToolEnvironment
from tandem.rollout.environments.tools.forked_call import RaisedError
from tandem.rollout.environments.tools.schema_arguments import SchemaArguments
from tandem.rollout.environments.tools.sources import load_tools
from tandem.rollout.environments.tools.tool import FunctionTool, Instance
from tests.support import tools
from tests.support.paths import ROOT
from tests.support.processes import has_ended, wait_until_gone
from tests.support.verl_tools import FUNCTION_TOOLS, VERL_TOOL, VERL_YAML
from tests.support.waiting import eventually

TOOLS = [f"tests.support.tools:{name}" for name in ("add", "fail", "start", "wait", "ignore_cancellation")]
TASK = {"data_source": "", "prompt": [], "ability": "", "ground_truth": "", "extra_info": {}}
ADD_SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.\n\nTheir sum is exact.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number, of any size."},
                "b": {"type": "integer", "description": "The second one.", "default": 1},
            },
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(autouse=True)
def _nothing_has_started() -> None:
    tools.STARTED.clear()


def call(tool: str, /, **arguments: object) -> dict[str, Any]:
    return {"id": "call", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}


UNPARSABLE = {"id": "call", "type": "function", "function": {"name": "", "arguments": "{"}, "error": "it is not JSON"}


def play(
    *turns: Sequence[Mapping[str, Any]],
    sources: Sequence[str] = TOOLS,
    seconds: float = 60.0,
    extra_info: Mapping[str, Any] = {},
    **limits: float,
) -> list[StepResult]:
    """What each turn leads to. Each has the calls of one action."""

    async def main() -> list[StepResult]:
        environment = ToolEnvironment(sources, **limits)
        await environment.reset({**TASK, "extra_info": extra_info}, seed=1, episode_id="e")
        try:
            actions = [{"role": "assistant", "content": "", **({"tool_calls": turn} if turn else {})} for turn in turns]
            return [
                await environment.step(action, deadline=time.time() + seconds, idempotency_key=f"e/{number}")
                for number, action in enumerate(actions)
            ]
        finally:
            await environment.close()

    return asyncio.run(main())


def contents(messages: Sequence[Message]) -> list[str]:
    return [message["content"] for message in messages]


def test_the_schema_of_a_function_follows_from_its_hints_and_its_docstring() -> None:
    assert load_tools(("tests.support.tools:add",))["add"].schema == ADD_SCHEMA


def test_every_call_is_executed_in_order_and_a_turn_without_one_ends_the_episode() -> None:
    first, last = play([call("add", a=1), call("add", a="2", b=3)], [])
    assert first.messages == [
        {"role": "tool", "tool_call_id": "call", "name": "add", "content": text} for text in ("2", "5")
    ]
    assert not first.terminated and first.reward == 0.0
    assert last.terminated and last.messages == []
    assert last.info == {"num_tool_calls": 2, "num_invalid_calls": 0, "num_tool_failures": 0, "tool_errors": {}}


def test_only_tools_that_declare_it_run_at_the_same_time() -> None:
    calls = [call("wait", name="a"), call("wait", name="b"), call("add", a=1), call("wait", name="c")]
    (result,) = play(calls)
    assert contents(result.messages) == ["a b", "a b", "2", "a b c"]
    assert "add" not in tools.STARTED, "a function changes nothing here"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise", "error: exception: ValueError: no such page (tools.py:"),
        ("block", "error: timeout: the tool had not ended after 1."),
        ("crash", "error: crashed: its process ended without a result"),
        ("exit", "error: crashed: its process ended without a result"),
    ],
)
def test_a_failed_call_is_an_answer_and_the_calls_after_it_are_executed(how: str, told: str) -> None:
    (result,) = play([call("fail", how=how), call("add", a=1)], seconds=4.0 if how == "block" else 60.0)
    failed, added = contents(result.messages)
    assert failed.startswith(told) and added == "2"
    assert result.info["num_tool_failures"] == 1 and result.info["num_tool_calls"] == 2
    kind = told.split(": ")[1]
    assert result.info["tool_errors"] == {kind: 1}
    assert [(one["tool"], one["outcome"]) for one in result.tool_outcomes] == [("fail", kind), ("add", "result")]
    assert all(one["seconds"] is not None for one in result.tool_outcomes)


def test_what_a_function_starts_ends_with_its_call(tmp_path: Path) -> None:
    (result,) = play([call("start", file=str(tmp_path / "pid"))])
    assert contents(result.messages) == ["started"]
    eventually(lambda: has_ended(int((tmp_path / "pid").read_text())))


def test_what_a_function_starts_ends_with_a_killed_process_of_environments(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import asyncio, time\nfrom tandem.rollout.environments.tools.forked_call import call_in_fork\n"
        "from tests.support.tools import start\n"
        f"asyncio.run(call_in_fork(lambda: start({str(file)!r}) and time.sleep(3600), 60))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as environments:
        eventually(lambda: file.exists() and file.read_text())
        environments.kill()
    wait_until_gone(int(file.read_text()))


def test_a_coroutine_that_ignores_its_cancellation_is_not_waited_for() -> None:
    (result,) = play([call("ignore_cancellation"), call("wait", name="a")], seconds=1.0)
    late, waited = contents(result.messages)
    assert late.startswith("error: timeout: ") and waited == "a"


@pytest.mark.parametrize(
    ("arguments", "told"), [({"surplus": 1}, "unexpected keyword argument 'surplus'"), ({}, "its reward is nan")]
)
def test_arguments_that_only_the_schema_allows_and_rewards_that_are_no_numbers_fail_their_call(
    arguments: dict[str, object], told: str
) -> None:
    async def search() -> tuple[str, float]:
        return "found", float("nan")

    schema = {"function": {"name": "search"}}
    tool = FunctionTool(search, schema, SchemaArguments(schema, "search.py"), returns_reward=True)
    with pytest.raises(RaisedError, match=told):
        asyncio.run(tool.execute(Instance("", {}), arguments, seconds=5.0, max_chars=100))


def test_an_invalid_call_says_why() -> None:
    (result,) = play([call("subtract", a=1), UNPARSABLE, call("add"), call("add", a="x", c=1)], max_invalid_calls=9)
    assert contents(result.messages) == [
        "error: unknown_tool: there is no tool 'subtract'; there is add, fail, start, wait, ignore_cancellation",
        "error: unparsable_call: it is not JSON",
        "error: bad_arguments: a: Field required",
        "error: bad_arguments: a: Input should be a valid integer, unable to parse string as an integer; "
        "c: Extra inputs are not permitted",
    ]
    errors = {"unknown_tool": 1, "unparsable_call": 1, "bad_arguments": 2}
    expected = {"num_tool_calls": 0, "num_invalid_calls": 4, "num_tool_failures": 0, "tool_errors": errors}
    assert result.info == expected and not result.terminated
    assert [(one["tool"], one["outcome"], one["seconds"]) for one in result.tool_outcomes] == [
        ("", "unknown_tool", None),
        ("", "unparsable_call", None),
        *[("add", "bad_arguments", None)] * 2,
    ]


def test_invalid_calls_in_a_row_end_the_episode() -> None:
    turns = [[UNPARSABLE], [call("add", a=1), UNPARSABLE], [UNPARSABLE, call("add", a=1)]]
    results = play(*turns, max_invalid_calls=2)
    assert [result.terminated for result in results] == [False, False, True]
    assert contents(results[2].messages)[1] == "2", "every call of the turn is executed"


def test_calls_past_the_limit_are_not_executed() -> None:
    (result,) = play([call("wait", name=name, seconds=0) for name in "abc"], max_calls=2)
    told = "error: call_limit: the call was not executed: an episode has at most 2 calls"
    assert contents(result.messages)[2] == told and tools.STARTED == ["a", "b"]
    assert {"tool": "wait", "outcome": "call_limit", "seconds": None} in result.tool_outcomes
    (result,) = play([UNPARSABLE] * 70, max_invalid_calls=99)
    assert len(result.messages) == 65
    assert contents(result.messages)[-1] == "error: call_limit: 6 more calls were not executed: a turn has at most 64"


def test_a_long_result_says_what_was_cut_and_a_step_stays_small() -> None:
    (result,) = play([call("fail", how="much")], max_result_chars=10)
    assert contents(result.messages) == ["😀😀😀😀😀\n[19990 of 20000 characters left out]\n😀😀😀😀😀"]
    (result,) = play([call("fail", how="much")] * 64, seconds=600.0, max_calls=64, max_result_chars=16_000)
    assert len(json.dumps(result.messages)) < 256 << 10
    assert all("😀\n[19750 of 20000" in text for text in contents(result.messages))


def test_verls_tools_are_used_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "verl_counter.py").write_text(VERL_TOOL)
    (tmp_path / "tools.yaml").write_text(VERL_YAML)
    row = {"tools_kwargs": {"count": {"create_kwargs": {"start": 10}}, "other": None}}
    turns = [[call("count", by=1), call("count", by=2)], [call("count")], []]
    results = play(*turns, sources=[str(tmp_path / "tools.yaml")], extra_info=row)
    assert contents(results[0].messages) == ["now 12", "now 16"], "one instance for the whole episode"
    assert contents(results[1].messages) == ["error: bad_arguments: 'by' is a required property"]
    assert [result.reward for result in results] == [1.0, 0.0, 16.0]
    import verl_counter

    assert verl_counter.EVENTS == ["create", "release"]
    (tmp_path / "functions.py").write_text(FUNCTION_TOOLS)
    (result,) = play([call("double", a=2), call("half", a=3)], sources=[str(tmp_path / "functions.py")])
    assert contents(result.messages) == ["4", "1.5"] and result.reward == 0.25


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "calculate",
            "'calculate' names no tool; write python, file.py:function, module.path:function, a YAML or a JSON file",
        ),
        ("missing.py:add", "missing.py:add: missing.py is no file (looked in "),
        ("tests.support.tools:absent", "tests.support.tools has no function absent"),
        ("tests.support.tools:no_hint", "the parameter a has no type hint"),
        ("tests.support.tools:no_docstring", "the function has no docstring, by which the policy knows "),
        ("tests.support.tools:other_parameter", "the docstring describes b, which is no parameter"),
        ("tests.support.tools:any_number", "the parameter a cannot be given by its name"),
        ("missing.yaml", "missing.yaml: no such file (looked in "),
        ("list.yaml", "list.yaml has no list `tools`"),
        ("broken.yaml", "broken.yaml cannot be read: "),
        ("mcp.yaml", "mcp.yaml: tools[0]: config.type is 'mcp'; only \"native\" tools are known"),
        ("class.yaml", "class.yaml: tools[0]: json has no class Absent"),
        ("differs.py", "differs.py: schema and function differ in the parameter a"),
        ("plain.py", "plain.py: no function there has @function_tool; write plain.py:function"),
    ],
)
def test_a_source_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("- a\n")
    Path("broken.yaml").write_text("tools: [\n")
    Path("mcp.yaml").write_text("tools: [{class_name: a.B, config: {type: mcp}}]")
    Path("class.yaml").write_text("tools: [{class_name: json.Absent, config: {}}]")
    Path("differs.py").write_text(FUNCTION_TOOLS.replace("def halve(a):", "def halve(b):").replace("a / 2", "b / 2"))
    Path("plain.py").write_text("def add():\n    '''Adds.'''\n")
    with pytest.raises(ContractError) as refused:
        load_tools((source,))
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_two_tools_of_one_name_and_limits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ContractError, match="two tools have the name add; rename one of them"):
        load_tools((TOOLS[0], TOOLS[0]))
    with pytest.raises(ContractError, match=r"arguments\.max_calls is 0, and it must be a whole number of at least 1"):
        ToolEnvironment(TOOLS, max_calls=0)
    with pytest.raises(ContractError, match=r"arguments\.max_result_chars is 16001, at most 16000"):
        ToolEnvironment(TOOLS, max_result_chars=16_001)
    for wrong in (0, -1.0, "10"):
        with pytest.raises(ContractError, match=r"arguments\.call_seconds is .*, and it must be a number above 0"):
            ToolEnvironment(TOOLS, call_seconds=wrong)  # type: ignore[arg-type]


def test_a_call_ends_after_its_own_time_though_the_step_has_more() -> None:
    calls = [call("wait", name="a", seconds=3600), call("wait", name="b", seconds=0)]
    (result,) = play(calls, seconds=600.0, call_seconds=0.5)
    late, waited = contents(result.messages)
    assert late == "error: timeout: the tool had not ended after 0.5 s" and waited.endswith("b")


def test_tools_in_a_recipe_are_an_environment_and_a_wrong_one_is_a_config_error() -> None:
    config = EnvironmentConfig(tools=("missing.py:add",), arguments={"max_calls": 2})
    assert config.path == TOOL_ENVIRONMENT and config.arguments == {"max_calls": 2, "tools": ["missing.py:add"]}
    assert EnvironmentConfig.model_validate(config.model_dump(mode="json")) == config, "a run's own config.json"
    with pytest.raises(ValueError, match="path and tools exclude each other"):
        EnvironmentConfig(path="a:B", tools=("a:b",))
    with pytest.raises(ConfigError, match=r"^environment\.tools: missing\.py:add: missing\.py is no file [^\n]*$"):
        asyncio.run(check_class(config))


def test_the_calculator_knows_arithmetic_alone() -> None:
    source = f"{ROOT}/examples/environments/calculator.py:calculate"
    expressions = ["(48 + 24) / 3", "1,000 * -2", "1 / 3", "1 / 0", "__import__('os').getpid()"]
    (result,) = play([call("calculate", expression=one) for one in expressions], sources=[source])
    *values, zero, code = contents(result.messages)
    assert values == ["24", "-2000", "0.3333333333"]
    assert zero.startswith("error: exception: ZeroDivisionError: ")
    assert code.startswith("error: exception: ValueError: __import__('os').getpid() is no arithmetic")
