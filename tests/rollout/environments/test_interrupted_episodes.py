"""Episodes whose environment or sampler ends in the middle: they go on as the environment's class declares."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.errors import ConfigError, EpisodeError
from tandem.protos.types import Trajectory, TrajectoryGroup, VersionSpan
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeFigures, EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.rollout.sampler import Completion, SamplingRequest
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.support.episodes import PROMPT, SAMPLING, ScriptedSampler, prompt_of, sampled_parts, tokenizer

CLASSES = "tests.support.environments"
WORDS = ("one", "bad", "end")
KILLED_ONCE = {"faults": {"bad": "once die"}}
HANGS_ONCE = {"faults": {"bad": "once hang"}}


@dataclass
class Played:
    """What came of one call of `sample`. `turns`: the requests that the sampler got, by turn."""

    row: Trajectory | None
    saved: Trajectory | None
    turns: list[int]
    figures: EpisodeFigures
    requests: list[SamplingRequest]


def play(
    encoder: ChatEncoder,
    marks: Path,
    name: str,
    sampler: ScriptedSampler | None = None,
    *,
    unfinished: Trajectory | None = None,
    until: Callable[[int, ScriptedSampler], bool] | None = None,
    max_attempts: int = 3,
    **arguments: Any,
) -> Played:
    """Trajectory 1 of a prompt. It ends early once `until`, which gets the number of changes so far, is true; `saved`
    is then what another sampler would get.
    """
    marks.mkdir(exist_ok=True)
    config = EnvironmentConfig(
        path=f"{CLASSES}:{name}",
        arguments={"marks": str(marks), **arguments},
        step_seconds=60.0,
        max_attempts=max_attempts,
    )
    chosen = sampler or ScriptedSampler(lambda _: WORDS)
    changes: list[None] = []

    async def main() -> Played:
        pool = EnvironmentPool(config)
        await pool.start()
        episodes = EpisodeSampler(chosen, pool, EpisodeEncoder(encoder), config, seed=5)
        try:
            task = asyncio.create_task(
                episodes.sample(prompt_of(), SAMPLING, 1, unfinished=unfinished, on_change=lambda: changes.append(None))
            )
            async with asyncio.timeout(60.0):
                while until is not None and not until(len(changes), chosen):
                    await asyncio.sleep(0.01)
                saved = await episodes.unfinished({"0-0"}) if until is not None else {}
                if until is not None:
                    task.cancel()
                row = None if until is not None else await task
            turns = [int(one.request_id.split("/")[1]) for one in chosen.requests]
            return Played(row, saved.get(("0-0", 1)), turns, episodes.figures, chosen.requests)
        finally:
            await pool.close()

    return asyncio.run(main())


def calls(marks: Path) -> list[str]:
    """The calls that the environments got: "reset", "restore", "step 0", …"""
    lines = [line.split() for line in (marks / "calls").read_text().splitlines()]
    return [f"step {line[1].split('/')[-2]}" if line[0] == "step" else line[0] for line in lines]


def keys(marks: Path) -> list[str]:
    return [line.split()[1] for line in (marks / "calls").read_text().splitlines() if line.startswith("step")]


def stored(row: Trajectory) -> Trajectory:
    """The row as the next holder of its group gets it."""
    (known,) = decode_group(encode_group(TrajectoryGroup(prompt_of(), (row,)))).rows
    assert isinstance(known, Trajectory)
    return known


def contents(row: Trajectory) -> list[str]:
    return [message["content"] for message in row.metadata["messages"][len(PROMPT) :]]


def same_tokens(one: Trajectory, other: Trajectory) -> bool:
    pairs = zip(one.segments, other.segments, strict=True)
    columns = ("ids", "behavior_logprobs", "loss_mask")
    return all(
        a.spans == b.spans and all(np.array_equal(getattr(a, c), getattr(b, c)) for c in columns) for a, b in pairs
    )


@pytest.mark.parametrize(
    ("name", "expected", "turns", "resumed_at"),
    [
        ("Noted", ["reset", "step 0", "step 1", "reset", "step 0", "step 1", "step 2"], [0, 1, 0, 1, 2], []),
        ("Replayed", ["reset", "step 0", "step 1", "reset", "step 0", "step 1", "step 2"], [0, 1, 2], [1]),
        ("Restored", ["reset", "step 0", "step 1", "restore", "step 1", "step 2"], [0, 1, 2], [1]),
    ],
)
def test_an_episode_whose_environment_is_killed_in_a_step_goes_on_as_its_class_declares(
    encoder: ChatEncoder, tmp_path: Path, name: str, expected: list[str], turns: list[int], resumed_at: list[int]
) -> None:
    played = play(encoder, tmp_path / "killed", name, max_attempts=2, **KILLED_ONCE)
    assert played.row is not None
    assert calls(tmp_path / "killed") == expected
    assert played.turns == turns, "no turn that is known was sampled again"
    assert played.row.metadata["resumed_at"] == resumed_at
    assert (played.figures.resumed_episodes, played.figures.differing_episodes) == (len(resumed_at), 0)
    names = [key.rsplit("/", 2)[0] for key in keys(tmp_path / "killed")]
    assert len(set(names)) == (1 if resumed_at else 2) and len(set(keys(tmp_path / "killed"))) == len(turns)
    assert (played.row.text, played.row.earned_reward) == ("one\nbad\nend", 1.5)
    if name == "Restored":  # nobody else knows its number
        assert contents(played.row)[0] == f"number {played.row.metadata['info']['number']}"
    else:
        calm = play(encoder, tmp_path / "calm", name).row
        assert calm is not None and same_tokens(played.row, calm) and contents(played.row) == contents(calm)


def test_an_environment_that_is_killed_while_the_policy_speaks_is_made_to_repeat_its_steps(
    encoder: ChatEncoder, tmp_path: Path
) -> None:
    class Kills(ScriptedSampler):
        async def _generate(self, request: SamplingRequest) -> Completion:
            if len(self.requests) == 1:
                children = psutil.Process().children()
                (process,) = [one for one in children if "tandem.rollout.environments.inside" in one.cmdline()]
                os.kill(process.pid, signal.SIGKILL)
            return await super()._generate(request)

    played = play(encoder, tmp_path, "Replayed", Kills(lambda _: WORDS))
    assert calls(tmp_path) == ["reset", "step 0", "reset", "step 0", "step 1", "step 2"]
    assert played.turns == [0, 1, 2] and played.row is not None and played.row.earned_reward == 1.5


def test_an_environment_that_differs_when_it_is_repeated_begins_anew_at_the_cost_of_no_attempt(
    encoder: ChatEncoder, tmp_path: Path
) -> None:
    sampler = ScriptedSampler(lambda _: ("random", "bad", "end"))
    played = play(encoder, tmp_path, "Replayed", sampler, max_attempts=2, **KILLED_ONCE)
    again = ["reset", "step 0", "reset", "step 0", "step 1", "step 2"]
    assert calls(tmp_path) == ["reset", "step 0", "step 1", *again]
    assert (played.figures.resumed_episodes, played.figures.differing_episodes) == (0, 1)
    assert played.turns == [
        0,
        1,
        0,
        1,
        2,
    ]
    assert played.row is not None and played.row.metadata["resumed_at"] == []
    text = tokenizer().decode(played.row.segments[0].ids.tolist())
    assert contents(played.row)[2] in text, "what the policy saw and what the trajectory says are the same episode"


def test_a_snapshot_that_cannot_be_restored_costs_one_attempt(encoder: ChatEncoder, tmp_path: Path) -> None:
    (tmp_path / "spoilt").touch()
    played = play(encoder, tmp_path, "Restored", max_attempts=3, **KILLED_ONCE)
    assert calls(tmp_path) == ["reset", "step 0", "step 1", "reset", "step 0", "step 1", "step 2"]
    assert played.row is not None and played.row.metadata["resumed_at"] == [] and played.figures.resumed_episodes == 0


@pytest.mark.parametrize("name", ["Replayed", "Restored"])
@pytest.mark.parametrize(
    ("stops_at", "faults", "num_changes", "answered", "later"),
    [
        ((2, 2), {}, 4, ["step 0", "step 1"], ["step 2"]),
        (None, HANGS_ONCE, 3, ["step 0"], ["step 1", "step 2"]),
        ((0, 1), {}, 0, [], ["step 0", "step 1", "step 2"]),
    ],
    ids=["in the middle of a turn", "while the environment answers", "in the first turn"],
)
def test_an_episode_whose_sampler_is_killed_goes_on_with_another_one(
    encoder: ChatEncoder,
    tmp_path: Path,
    name: str,
    stops_at: tuple[int, int] | None,
    faults: dict[str, Any],
    num_changes: int,
    answered: Sequence[str],
    later: Sequence[str],
) -> None:
    def reached(changes: int, sampler: ScriptedSampler) -> bool:
        return changes == num_changes and bool(sampler.begun if stops_at else [*marks.glob("fault-*")])

    marks = tmp_path / "marks"
    first = ScriptedSampler(lambda _: WORDS, stops_at=stops_at)
    saved = play(encoder, marks, name, first, until=reached, **faults).saved
    assert saved is not None and saved.finish_reason == "abort"
    (marks / "calls").unlink()

    second = play(encoder, marks, name, unfinished=stored(saved), **faults)
    begins = ["reset", *answered] if name == "Replayed" else ["restore"]
    assert calls(marks) == [*begins, *later]
    assert second.row is not None and second.row.metadata["resumed_at"] == [len(answered)]
    assert second.turns == ([2] if stops_at is None else [*range(stops_at[0], 3)]), "only what was missing"
    assert len(second.requests[0].sampled_ids) == (stops_at[1] if stops_at else 0), "the turn is continued"
    assert (second.row.text, second.row.earned_reward) == ("one\nbad\nend", 1.5)
    calm = play(encoder, tmp_path / "calm", name).row
    assert calm is not None
    if name == "Replayed":
        assert same_tokens(second.row, calm) and contents(second.row) == contents(calm)
    else:
        assert contents(second.row)[0] == f"number {second.row.metadata['info']['number']}"
    values = [
        [one.behavior_logprobs[a:b].tolist() for a, b in sampled_parts(one)]
        for one in (*second.row.segments, *calm.segments)
    ]
    assert values[0] == values[1], "every sampled token is there once"


def test_the_rest_of_an_interrupted_turn_has_the_version_that_sampled_it(encoder: ChatEncoder, tmp_path: Path) -> None:
    first = ScriptedSampler(lambda _: WORDS, stops_at=(1, 2))
    saved = play(encoder, tmp_path, "Replayed", first, until=lambda changes, sampler: bool(sampler.begun)).saved
    assert saved is not None
    second = ScriptedSampler(lambda _: WORDS, first_version=7)
    row = play(encoder, tmp_path, "Replayed", second, unfinished=stored(saved)).row
    assert row is not None
    (segment,) = row.segments
    (start, _), (interrupted, _), (last, _) = sampled_parts(segment)
    expected = (VersionSpan(start, 1, 0), VersionSpan(interrupted + 2, 1, 7), VersionSpan(last, 1, 8))
    assert segment.spans == expected


def test_episodes_that_begin_anew_anyway_are_not_saved(encoder: ChatEncoder, tmp_path: Path) -> None:
    sampler = ScriptedSampler(lambda _: WORDS, stops_at=(1, 2))
    played = play(encoder, tmp_path, "Noted", sampler, until=lambda changes, sampler: bool(sampler.begun))
    assert played.saved is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("UnknownResume", "the class's resume is 'rewind'; it must be 'restart' or 'replay' or 'snapshot'"),
        ("NoSnapshots", "the class has no method snapshot and no restore"),
    ],
)
def test_a_class_that_cannot_go_on_as_it_declares_is_refused_in_one_line(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^environment\.path: {CLASSES}:{name}: [^\n]*$") as refused:
        asyncio.run(EnvironmentPool(EnvironmentConfig(path=f"{CLASSES}:{name}")).start())
    assert told in str(refused.value)


def test_a_snapshot_has_a_largest_size(encoder: ChatEncoder, tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match="snapshot: snapshot returned 32769 bytes; it may have 32768"):
        play(encoder, tmp_path, "LargeSnapshots", max_attempts=1)
