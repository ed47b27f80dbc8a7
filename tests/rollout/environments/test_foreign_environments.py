"""Classes written for other libraries are environments as they are, recognised by their methods."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

from tandem import Environment, Observation, StepResult
from tandem.protos.errors import ConfigError, EpisodeError
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.inside import load_class, resume_mode
from tandem.rollout.environments.loading import ContractError
from tandem.rollout.environments.process import EnvironmentPool, check_class
from tests.support.foreign_environments import Vault

HERE = "tests.support.foreign_environments"
PROMPT = [{"role": "user", "content": "Play."}]
TASK: Mapping[str, Any] = {
    "data_source": "games",
    "prompt": PROMPT,
    "ability": "",
    "ground_truth": "12",
    "extra_info": {"answer": "2", "max_turns": 2},
}
Turn = str | Mapping[str, Any]


def call(name: str, **arguments: object) -> Mapping[str, Any]:
    """The policy's message with one call."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}


async def step(environment: Environment, turn: Turn) -> StepResult:
    action = {"role": "assistant", **({"content": turn} if isinstance(turn, str) else turn)}
    return await environment.step(action, deadline=time.time() + 10, idempotency_key="a/0")


async def played(
    path: str, turns: Sequence[Turn], task: Mapping[str, Any] = TASK, seed: int = 7, **arguments: object
) -> tuple[Observation, list[StepResult]]:
    environment = load_class(path)(**arguments)
    try:
        observation = await environment.reset(task, seed=seed, episode_id="group/0")
        return observation, [await step(environment, turn) for turn in turns]
    finally:
        await environment.close()
        await environment.close()


def play(name: str, turns: Sequence[Turn], **more: Any) -> tuple[Observation, list[StepResult]]:
    return asyncio.run(played(f"{HERE}:{name}", turns, **more))


def texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [message["content"] for message in messages]


def test_the_methods_of_trls_class_are_tools_with_the_schemas_that_trl_gives_them() -> None:
    schemas = load_class(f"{HERE}:Vault")().tool_schemas  # type: ignore[attr-defined]
    assert [one["function"]["name"] for one in schemas] == ["listen", "turn"]
    for one in schemas:
        name = one["function"]["name"]
        expected = get_json_schema(getattr(Vault(), name))["function"]
        shown, wanted = one["function"]["parameters"], expected["parameters"]
        assert one["function"]["description"] == expected["description"]
        assert shown.get("required", []) == wanted.get("required", [])
        for parameter, about in wanted["properties"].items():
            assert about.items() <= shown["properties"][parameter].items(), f"{name}: {parameter}"


@pytest.mark.parametrize("name", ["Vault", "AwaitedVault"])
def test_trls_class_gets_the_columns_of_the_row_and_its_reward_is_read_after_each_turn(name: str) -> None:
    turns = [call("turn", number=1), call("turn", number=2), call("listen"), call("turn", number=9), "I am done"]
    observation, results = play(name, turns)
    assert observation.messages == [{"role": "user", "content": f"{PROMPT} of games"}]
    said = [text for result in results for text in texts(result.messages)]
    assert said[:3] == ["{'wheel': 1}", "{'wheel': 2}", "click"]
    assert said[3].startswith("error: exception: ValueError: Game over. (foreign_environments.py:")
    assert [result.reward for result in results] == [0.25, 0.25, 0.0, 0.0, 0.0]
    assert [result.terminated for result in results] == [False] * 4 + [True]
    assert results[-1].info["num_tool_calls"] == 4 and results[-1].info["num_tool_failures"] == 1


def test_get_reward_is_asked_once_at_the_end() -> None:
    _, results = play("JudgedVault", [call("turn", number=2), call("get_reward"), call("_hidden"), "done"])
    assert [result.reward for result in results] == [0.0, 0.0, 0.0, 2.0]
    assert all(texts(result.messages)[0].startswith("error: unknown_tool") for result in results[1:3])


def test_get_reward_is_asked_where_a_limit_ends_the_episode() -> None:
    async def main(path: str) -> list[float]:
        environment: Any = load_class(path)()
        await environment.reset(TASK, seed=7, episode_id="group/0")
        earned = (await step(environment, call("turn", number=2))).reward
        return [earned, await environment.final_reward()]

    assert asyncio.run(main(f"{HERE}:JudgedVault")) == [0.0, 2.0]
    assert asyncio.run(main(f"{HERE}:Vault")) == [0.25, 0.0], "what the turn earned is known"


def test_trls_reset_may_return_nothing() -> None:
    observation, _ = play("Vault", [], task={**TASK, "extra_info": {"answer": ""}})
    assert observation.messages == []


@pytest.mark.parametrize("name", ["Doubling", "AwaitedDoubling"])
def test_an_environment_with_gyms_methods_gets_texts_and_the_seed(name: str) -> None:
    observation, results = play(name, ["a", "late", "win"])
    assert texts(observation.messages)[0].startswith("7 ")
    assert texts(results[0].messages)[0].startswith("aa ")
    assert [(one.reward, one.terminated, one.truncated) for one in results] == [
        *((0.5, False, False), (0.5, False, True), (0.5, True, False))
    ]
    assert results[0].info == {"nan": "NaN", "set": "{1}", "1": 2, "twice": "aa"}


def test_episodes_side_by_side_that_draw_from_the_processs_random_numbers_repeat_themselves() -> None:
    async def both() -> list[tuple[Observation, list[StepResult]]]:
        path = f"{HERE}:Doubling"
        return await asyncio.gather(*(played(path, ["a", "b"], seed=seed) for seed in (1, 2, 1, 2)))

    one, other, *again = asyncio.run(both())
    assert again == [one, other] and one != other, "all trajectories of a group meet the same environment"


def test_a_method_that_blocks_delays_no_other_episode_and_ends_with_its_own() -> None:
    async def both() -> StepResult:
        kind = load_class(f"{HERE}:Doubling")
        blocked, other = (kind(faults={"stop": "block"}) for _ in range(2))
        for environment in (blocked, other):
            await environment.reset(TASK, seed=0, episode_id="group/0")
        waiting = asyncio.create_task(step(blocked, "stop"))
        await asyncio.sleep(0)
        result = await step(other, "go")
        assert not waiting.done()
        waiting.cancel()
        await blocked.close()
        await other.close()
        return result

    assert texts(asyncio.run(both()).messages)[0].startswith("gogo ")


def test_an_episode_that_hangs_or_crashes_in_a_run_leaves_the_others_of_its_process_alone() -> None:
    async def main() -> tuple[list[str], StepResult]:
        config = EnvironmentConfig(
            path=f"{HERE}:Doubling", arguments={"faults": {"stop": "block", "die": "die"}}, step_seconds=20.0
        )
        pool, failed = EnvironmentPool(config), []
        await pool.start()
        try:
            hanging, dying, sound = [await pool.open(f"group/{number}") for number in range(3)]
            for number, environment in enumerate((hanging, dying, sound)):
                await environment.reset(TASK, seed=0, episode_id=f"group/{number}")
            for environment, word in ((hanging, "stop"), (dying, "die")):
                action = {"role": "assistant", "content": word}
                with pytest.raises(EpisodeError) as error:
                    seconds = 0.3 if word == "stop" else 20
                    await environment.step(action, deadline=time.time() + seconds, idempotency_key="")
                failed.append(str(error.value))
                await environment.close()
            return failed, await step(sound, "go")
        finally:
            await pool.close()

    (hung, died), result = asyncio.run(main())
    assert (
        hung.startswith("step has not ended after 0.") and died == "step: the environment ended its process during step"
    )
    assert texts(result.messages)[0].startswith("gogo ")


def test_the_tools_of_trls_class_are_those_of_the_process_of_a_run() -> None:
    async def main() -> Sequence[Mapping[str, Any]]:
        pool = EnvironmentPool(EnvironmentConfig(path=f"{HERE}:Vault"))
        try:
            await pool.start()
            return pool.tools
        finally:
            await pool.close()

    assert [one["function"]["name"] for one in asyncio.run(main())] == ["listen", "turn"]


def test_close_is_called_at_the_end_of_an_episode(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    play("Doubling", ["a"], marks=str(marks))
    assert marks.read_text() == "closed\n"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", r"^KeyError: 'no such move' \(foreign_environments\.py:\d+\)$"),
        ("die", "^the environment ended its process during step$"),
        ("exit", "^the environment ended its process during step$"),
        ("array", r"^step returned the observation \[1\.0, 2\.0\]; the policy reads texts$"),
        ("no reward", "^the reward of step is None, which is no finite number$"),
        ("old", r"^step returned .* instead of \(observation, reward, terminated, truncated, info\)$"),
    ],
)
def test_a_step_that_fails_is_one_line(fault: str, told: str) -> None:
    with pytest.raises(ContractError, match=told):
        play("Doubling", ["now"], faults={"now": fault})


def test_a_path_may_name_a_function_that_makes_environments() -> None:
    observation, _ = asyncio.run(played(f"{HERE}:make", [], name="Doubling"))
    assert texts(observation.messages)[0].startswith("7 ")
    _, (result,) = asyncio.run(played(f"{HERE}:make", [call("turn", number=2)], name="Vault", limit=2))
    assert texts(result.messages) == ["{'wheel': 2}"]
    observation, _ = asyncio.run(played(f"{HERE}:make", [], name="Sound"))
    assert texts(observation.messages) == ["7"], "one of Tandem's"


def test_a_class_may_say_that_its_episodes_are_repeated() -> None:
    assert resume_mode(load_class(f"{HERE}:Doubling")) == "restart"
    assert resume_mode(load_class(f"{HERE}:Repeating")) == "replay"


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_game_of_textarena_shows_what_is_new_and_is_rewarded_at_its_end(is_wrapped: bool) -> None:
    observation, (first, last) = play("Countdown", ["a", "b"], is_wrapped=is_wrapped)
    assert texts(observation.messages) == ["[-1] 2 left" if is_wrapped else "2 left"]
    assert texts(first.messages) == ["[0] a\n[-1] 1 left" if is_wrapped else "1 left"]
    assert (first.reward, first.terminated) == (0.0, False)
    assert (last.reward, last.terminated, last.messages, last.info) == (0.75, True, [], {"reason": "over"})


def test_skyrls_class_is_made_of_the_row() -> None:
    arguments = {"env_config": {"greeting": "Hello"}}
    observation, results = play("Teacher", ["11", "12"], **arguments)
    assert observation.messages == [{"role": "user", "content": "Hello"}], "the row's prompt comes before it"
    assert [(texts(one.messages), one.reward, one.terminated) for one in results] == [
        *((["again"], 0.0, False), ([], 1.0, True))
    ]
    assert results[0].info == {"n": 1}
    with pytest.raises(ContractError, match="init changed the messages of the prompt; it may only add some"):
        play("Teacher", [], env_config={"greeting": "rewrite"})


def test_openenvs_client_gets_an_action_of_its_type() -> None:
    observation, (first, empty, last) = play("WordClient", ["go", "", "end"], base_url="ws://a")
    assert texts(observation.messages) == ["ws://a ['episode_id', 'seed']"]
    assert (texts(first.messages), first.reward, first.terminated) == (['{"echo": "go", "length": 2}'], 0.5, False)
    assert texts(empty.messages) == ["error: the action is invalid: String should have at least 1 character"]
    assert (last.reward, last.terminated) == (0.5, True)
    _, (result,) = play("Client", ["up"], base_url="", action_field="move")
    assert (texts(result.messages), result.reward) == (['{"echo": "up", "length": 1}'], 0.0)


def test_openenvs_environment_needs_no_server() -> None:
    observation, (first, last) = play("WordServer", ["a", "b"])
    assert texts(observation.messages) == ['{"echo": "7", "length": 0}']
    assert (first.reward, first.terminated, last.terminated) == (1.0, False, True)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("Formless", {}, "the class has no method reset and no step and no close (see tandem.Environment)"),
        ("OldGym", {"size": 3}, "TypeError: OldGym() takes no arguments"),
        ("Bare", {}, "Bare: turn: the parameter number has no type hint"),
        ("Trickster", {}, "RuntimeError: no board (foreign_environments.py:"),
        ("make", {"name": "text"}, "make: str has no method reset (see docs/environments.md)"),
        ("Client", {"base_url": ""}, "Client does not say what its actions are; set arguments.action_field"),
        ("PairClient", {"base_url": ""}, "Pair has the fields left, right; set arguments.action_field"),
        (
            "PairClient",
            {"base_url": "", "action_field": "left"},
            "Pair needs right, too, and the policy gives one text",
        ),
    ],
)
def test_a_class_that_is_no_environment_is_one_line_before_the_run(
    name: str, arguments: Mapping[str, Any], told: str
) -> None:
    config = EnvironmentConfig(path=f"{HERE}:{name}", arguments=dict(arguments))
    with pytest.raises(ConfigError) as refused:
        asyncio.run(check_class(config))
    said = str(refused.value)
    assert said.startswith(f"environment.path: {HERE}:{name}") and told in said and "\n" not in said
