"""Episodes: exact tokens, rewards at turns, limits, and environments that fail. The environments run in processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.errors import ConfigError, EpisodeError, UnavailableError
from tandem.protos.types import SamplingParameters, Trajectory, TrajectoryGroup, VersionSpan
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.rollout.sampler import Completion, SamplingRequest
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.support.episodes import (
    PROMPT,
    SAMPLING,
    ScriptedSampler,
    prompt_of,
    sampled_parts,
    tokenizer,
)
from tests.support.paths import ROOT
from tests.support.processes import has_ended
from tests.support.tiny_model import EOS_ID

ECHO = "tests.support.environments:Echo"
GUESS = str(ROOT / "examples" / "environments" / "guess_number.py") + ":GuessNumber"


def play(
    encoder: ChatEncoder,
    words: Callable[[int], Sequence[str]],
    rows: int = 1,
    sampling: SamplingParameters = SAMPLING,
    **config: Any,
) -> list[Trajectory]:
    """Trajectories 0 … rows − 1 of one prompt, all at the same time."""

    async def main() -> list[Trajectory]:
        settings = EnvironmentConfig(**{"path": ECHO, **config})
        pool = EnvironmentPool(settings)
        await pool.start()
        try:
            episodes = EpisodeSampler(ScriptedSampler(words), pool, EpisodeEncoder(encoder), settings, seed=5)
            return await asyncio.gather(*(episodes.sample(prompt_of(), sampling, number) for number in range(rows)))
        finally:
            await pool.close()

    return asyncio.run(main())


def test_the_tokens_of_an_episode_are_those_sampled_and_the_template_between_them(encoder: ChatEncoder) -> None:
    words = ["one", "two ", "end"]
    (row,) = play(encoder, lambda _: words)
    (segment,) = row.segments
    seed = tokenizer().decode(segment.ids.tolist()).partition("seed ")[2].partition("<|im_end|>")[0]
    conversation = [*PROMPT, {"role": "user", "content": f"seed {seed}"}]
    for word in words:
        conversation += [{"role": "assistant", "content": word}, {"role": "user", "content": f"{word}?"}]
    whole = encoder.encode(conversation[:-1])
    assert segment.ids.tolist() == whole[: len(segment.ids)].tolist(), "as if the template had encoded all of it"
    turns = sampled_parts(segment)
    assert [tokenizer().decode(segment.ids[a:b].tolist()) for a, b in turns] == [f"{w}<|im_end|>" for w in words]
    for turn, (start, end) in enumerate(turns):
        expected = [-(turn + 1) - place / 100 for place in range(end - start)]
        assert segment.behavior_logprobs[start:end].tolist() == pytest.approx(expected)
    assert not segment.behavior_logprobs[segment.loss_mask == 0].any()
    assert segment.spans == (VersionSpan(turns[0][0], 1, 0), VersionSpan(turns[2][0], 1, 1)), "of the changed weights"
    assert len(segment.ids) == turns[-1][1], "it ends with the last turn"


def test_rewards_are_on_the_last_token_of_the_turn_that_earned_them(encoder: ChatEncoder) -> None:
    (row,) = play(encoder, lambda _: ["one", "two", "end"])
    assert row.token_rewards is not None
    (rewards,) = row.token_rewards
    ends = [end - 1 for _, end in sampled_parts(row.segments[0])]
    assert np.flatnonzero(rewards).tolist() == ends and rewards[ends].tolist() == [0.25, 0.25, 1.0]
    assert (row.earned_reward, row.finish_reason, row.text) == (1.5, "stop", "one\ntwo\nend")
    assert row.metadata["stop"] == "terminated" and row.metadata["num_turns"] == 3
    assert row.metadata["info"] == {"said": "end"}
    assert [message["content"] for message in row.metadata["messages"]][2:] == ["one", "one?", "two", "two?", "end"]
    group = TrajectoryGroup(prompt_of(), (row,))
    (known,) = decode_group(encode_group(group)).rows
    assert isinstance(known, Trajectory) and known.metadata == row.metadata and known.earned_reward == 1.5


@pytest.mark.parametrize(
    ("limits", "stop", "finish", "turns"),
    [
        ({"max_turns": 2}, "turns", "stop", 2),
        ({"max_turn_tokens": 4}, "turn_tokens", "length", 2),
        ({"sampling": SamplingParameters(max_tokens=60)}, "episode_tokens", "length", 2),
    ],
)
def test_limits_end_an_episode(
    encoder: ChatEncoder, limits: Mapping[str, Any], stop: str, finish: str, turns: int
) -> None:
    (row,) = play(encoder, lambda _: ["one", "twenty", "thirty", "end"], **limits)
    assert (row.metadata["stop"], row.finish_reason) == (stop, finish)
    assert len(sampled_parts(row.segments[0])) == turns
    assert row.segments[0].loss_mask[-1] == 1, "no answer follows the last turn"


def test_a_turn_that_is_cut_off_is_no_action(encoder: ChatEncoder, tmp_path: Path) -> None:
    (row,) = play(encoder, lambda _: ["one", "twenty"], max_turn_tokens=4, arguments={"faults": {"twen": "raise"}})
    assert (row.finish_reason, row.metadata["stop"]) == ("length", "turn_tokens"), "the environment would have raised"


def test_an_answer_that_fills_the_models_context_ends_the_episode(encoder: ChatEncoder) -> None:
    long = SamplingParameters(max_tokens=5000)
    (row,) = play(encoder, lambda _: ["1", "2000", "1"], path="tests.support.environments:Chatty", sampling=long)
    assert (row.finish_reason, row.metadata["stop"], row.earned_reward) == ("length", "context", 2.0)
    assert row.text == "1\n2000" and len(row.segments[0].ids) < 200, "what nobody read is left out"
    with pytest.raises(EpisodeError, match="step: step returned more than 256 KiB"):
        play(encoder, lambda _: ["1", str(1 << 18)], path="tests.support.environments:Chatty")


def test_messages_that_the_template_refuses_are_the_environments_fault(encoder: ChatEncoder) -> None:
    with pytest.raises(EpisodeError, match="the chat template refuses the messages of step: no tools"):
        play(encoder, lambda _: ["1", "tool"], path="tests.support.environments:Chatty", max_attempts=1)


@pytest.mark.parametrize("fault", ["raise", "hang", "block", "die"])
def test_a_failed_environment_costs_attempts_and_loses_no_episode(
    encoder: ChatEncoder, tmp_path: Path, fault: str
) -> None:
    faults = {"bad": f"once {fault}"}
    rows = play(
        encoder,
        lambda number: ["one", "bad" if number % 2 else "good", "end"],
        rows=4,
        arguments={"faults": faults, "marks": str(tmp_path)},
        step_seconds=2.0,
        max_attempts=6,
    )
    assert [row.earned_reward for row in rows] == [1.5] * 4
    assert [row.text for row in rows] == ["one\ngood\nend", "one\nbad\nend"] * 2
    assert len(list(tmp_path.glob("fault-*"))) == 2, "each fault came once"
    if fault in ("raise", "hang"):
        assert not list(tmp_path.glob("open-*")), "every environment was closed"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise", "step: RuntimeError: the server of this environment is away (environments.py:"),
        ("hang", "step has not ended after "),
        ("die", "the environments' process has ended"),
        ("wrong type", "step: step returned str instead of StepResult"),
        ("no reward", "step: step returned the reward nan, which is no finite number"),
        ("silence", "step: step returned no messages although the episode goes on"),
    ],
)
def test_an_episode_that_always_fails_says_why_in_one_line(encoder: ChatEncoder, fault: str, told: str) -> None:
    step_seconds = 0.5 if fault == "hang" else 30.0
    config: dict[str, Any] = {"arguments": {"faults": {"bad": fault}}, "step_seconds": step_seconds, "max_attempts": 2}
    with pytest.raises(EpisodeError) as failed:
        play(encoder, lambda _: ["one", "bad", "end"], **config)
    assert told in str(failed.value) and "\n" not in str(failed.value)


def test_a_process_that_an_environment_leaves_behind_and_one_that_reads_hang_nothing(
    encoder: ChatEncoder, tmp_path: Path
) -> None:
    """The first holds the pipe of the answers after its parent was killed; the second reads standard input."""
    file = tmp_path / "forks.py"
    file.write_text(
        "import os, subprocess, time\nfrom tests.support.environments import Echo\n"
        "class Forks(Echo):\n"
        "    async def step(self, action, **more):\n"
        "        if action['content'] == 'read':\n"
        "            subprocess.run(['head', '-c', '5'])\n"
        "        elif action['content'] == 'fork' and not os.path.exists(str(self.marks / 'forked')):\n"
        "            (self.marks / 'forked').touch()\n"
        "            if os.fork() == 0:\n"
        "                (self.marks / 'child').write_text(str(os.getpid()))\n"
        "                time.sleep(3600)\n"
        "            time.sleep(3600)\n"
        "        return await super().step(action, **more)\n"
    )
    config: dict[str, Any] = {"path": f"{file}:Forks", "arguments": {"marks": str(tmp_path)}, "step_seconds": 1.0}
    (row,) = play(encoder, lambda _: ["fork", "read", "end"], **config)
    assert row.earned_reward == 1.5
    assert has_ended(int((tmp_path / "child").read_text())), "it was killed with its parent"


@pytest.mark.parametrize(
    ("path", "arguments", "told"),
    [
        ("tests.support.environments", {}, "names no class; write module.path:Class or path/to/file.py:Class"),
        ("missing.py:A", {}, "missing.py is no file (looked in "),
        ("no_such_module:A", {}, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.support.environments:Absent", {}, "tests.support.environments has no class Absent"),
        ("tests.support.environments:OnlyReset", {}, "the class has no method step and no close"),
        ("tests.support.environments:NeedsArgument", {}, "missing 1 required positional argument: 'size'"),
        ("tests.support.environments:NeedsArgument", {"size": -1}, "ValueError: the size is negative"),
    ],
)
def test_a_class_that_is_no_environment_is_refused_in_one_line(path: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=r"^environment\.path: [^\n]*$") as refused:
        asyncio.run(EnvironmentPool(EnvironmentConfig(path=path, arguments=arguments)).start())
    assert told in str(refused.value) and path in str(refused.value)


def test_an_environments_process_sees_no_secrets(
    encoder: ChatEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "k")
    monkeypatch.setenv("TANDEM_REDIS_URL", "redis://:secret@127.0.0.1:1/0")
    file = tmp_path / "spy.py"
    file.write_text(
        "import os\nfrom tests.support.environments import Echo\n"
        "class Spy(Echo):\n"
        "    async def step(self, action, **more):\n"
        "        result = await super().step(action, **more)\n"
        "        seen = sorted({'MY_API_KEY', 'TANDEM_REDIS_URL'} & set(os.environ))\n"
        "        return type(result)([], 0.0, True, info={'seen': seen})\n"
    )
    seen = [
        play(encoder, lambda _: ["one"], path=f"{file}:Spy", variables=declared)[0].metadata["info"]["seen"]
        for declared in ((), ("MY_API_KEY",))
    ]
    assert seen == [[], ["MY_API_KEY"]]


def test_the_trajectories_of_a_group_meet_the_same_environment(encoder: ChatEncoder) -> None:
    rows = play(encoder, lambda _: ["8", "4", "2", "6"], rows=3, path=GUESS, arguments={"shuffled": True})
    answers = {tuple(message["content"] for message in row.metadata["messages"]) for row in rows}
    assert len(answers) == 1


def test_binary_search_wins_every_game_and_shuffled_answers_do_not_help(encoder: ChatEncoder) -> None:
    def wins(shuffled: bool) -> int:
        async def main() -> int:
            settings = EnvironmentConfig(path=GUESS, arguments={"shuffled": shuffled})
            pool = EnvironmentPool(settings)
            await pool.start()
            try:
                episodes = EpisodeSampler(Searcher(lambda _: ()), pool, EpisodeEncoder(encoder), settings, seed=5)
                rows = await asyncio.gather(*(episodes.sample(prompt_of(index), SAMPLING, 0) for index in range(60)))
                return int(sum(row.earned_reward for row in rows))
            finally:
                await pool.close()

        return asyncio.run(main())

    assert wins(shuffled=False) == 60
    assert wins(shuffled=True) < 35


class Searcher(ScriptedSampler):
    """Halves the range that the environment's answers leave."""

    async def _generate(self, request: SamplingRequest) -> Completion:
        low, high = 1, 15
        text = self.tokenizer.decode(request.prompt_ids.tolist(), skip_special_tokens=False)
        for said, answer in zip(text.split("assistant\n")[1:-1], text.split("user\n")[1:], strict=True):
            guess = int(said.partition("<")[0])
            low, high = (guess + 1, high) if answer.startswith("higher") else (low, guess - 1)
        middle = (max(low, 1) + min(max(high, low), 15)) // 2
        ids = [*self._encode(str(middle)), EOS_ID]
        return Completion(ids, [0.0] * len(ids), [VersionSpan(0, 1, 0)], "stop")


def test_an_engine_that_ends_is_no_fault_of_the_environment(encoder: ChatEncoder) -> None:
    async def main() -> None:
        settings = EnvironmentConfig(path=ECHO)
        pool = EnvironmentPool(settings)
        await pool.start()
        try:
            sampler = ScriptedSampler(lambda _: ["one"], finish="error")
            await EpisodeSampler(sampler, pool, EpisodeEncoder(encoder), settings, seed=5).sample(
                prompt_of(), SAMPLING, 0
            )
        finally:
            await pool.close()

    with pytest.raises(UnavailableError, match="the engine ended turn 0 of 0-0 with 'error'"):
        asyncio.run(main())
