"""Each conformance check of an environment passes a sound class, and says in one line what is wrong with another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tandem.rollout.environments.checked_episode import CheckedClass, CheckError, first_difference
from tandem.rollout.environments.conformance import CHECKS
from tests.support.paths import ROOT

FAULTY = "tests.support.faulty_environments"
GUESS = str(ROOT / "examples" / "environments" / "guess_number.py") + ":GuessNumber"
COMPARED = {"deterministic": True}


def found(check: str, path: str, given: Mapping[str, Any] = COMPARED, seconds: float = 10.0) -> Mapping[str, Any]:
    """What a check of this class finds, in this process."""
    request = {"path": path, "arguments": {}, "task": {}, "actions": ["one", "two", "3", "4"], "step_seconds": seconds}

    async def make() -> Mapping[str, Any]:
        return await CHECKS[check](CheckedClass(request, lambda _: None), given)

    return asyncio.run(make())


@pytest.mark.parametrize("path", [f"{FAULTY}:Sound", GUESS, "tests.support.foreign_environments:Doubling"])
@pytest.mark.parametrize(
    "check", ["import", "contract", "determinism", "seeds", "concurrency", "cancellation", "close"]
)
def test_a_sound_class_passes(check: str, path: str) -> None:
    found(check, path)


def test_a_check_says_how_many_seeds_give_different_episodes() -> None:
    assert found("seeds", f"{FAULTY}:Sound") == {"note": "3 seeds, 3 different episodes"}
    assert found("seeds", f"{FAULTY}:Hashed") == {"note": "3 seeds, 3 different episodes"}, "reset shows the seed"
    assert found("seeds", f"{FAULTY}:Shared") == {"note": "3 seeds, 1 different episodes"}


def test_a_snapshot_is_restored_at_every_step() -> None:
    given = found("snapshot", f"{FAULTY}:Sound")
    assert len(given["states"]) == 3 and len(given["observations"]) == 4
    assert found("restore", f"{FAULTY}:Sound", given) == {}
    with pytest.raises(CheckError, match="restored from its snapshot after step 2 differ: step 3, messages: "):
        found("restore", f"{FAULTY}:Forgetful", given)


@pytest.mark.parametrize(
    ("check", "name", "told"),
    [
        ("import", "Absent", f"{FAULTY}:Absent: {FAULTY} has no class Absent"),
        ("contract", "Thankless", "final_reward: final_reward returned the reward nan, which is no finite number"),
        ("contract", "AtOnce", "step 1: it returned StepResult at once; write `async def`"),
        (
            *("contract", "NoDeadline"),
            "step cannot be called as tandem.Environment says: got an unexpected keyword argument 'deadline'",
        ),
        ("contract", "NoText", "the result of step 1: TypeError: Object of type set is not JSON serializable"),
        ("contract", "NoMessage", "the result of step 1: 'higher' is no chat message: it needs role and content"),
        ("contract", "Wordy", "the result of step 1: step 1 returned more than 256 KiB"),
        ("contract", "OnlyNumbers", "step 1: ValueError: invalid literal for int() with base 10: 'one'"),
        ("contract", "Hanging", "step 1 has not ended after 0.2 s"),
        ("contract", "SnapshotAlone", "the class has snapshot alone; a snapshot needs both snapshot and restore"),
        ("determinism", "Random", "two episodes with the same seed and actions differ: step 1, reward: 0."),
        ("seeds", "SmallSeeds", "with the seed 2147483647, reset: ValueError: the seed is too large"),
        (
            *("concurrency", "Shared"),
            "an episode alone and one beside 7 others differ: step 2, messages: "
            '[{"role": "user", "content": "[\'one\', \'two\']"}] and ',
        ),
        ("cancellation", "Stubborn", "step goes on for 0.2 s after it was cancelled"),
        ("cancellation", "KeepsLock", "in an episode after cancelled ones, step 1 has not ended after 0.2 s"),
        ("close", "ClosesOnce", "a second close after 0 steps: RuntimeError: it is closed"),
        ("close", "NeedsStep", "close after 0 steps: IndexError: pop from empty list"),
        ("snapshot", "TextState", "snapshot: snapshot returned str instead of bytes"),
    ],
)
def test_a_check_says_in_one_line_what_is_wrong(check: str, name: str, told: str) -> None:
    with pytest.raises(CheckError) as failed:
        found(check, f"{FAULTY}:{name}", seconds=0.2 if " 0.2 s" in told else 30.0)
    assert str(failed.value).startswith(told) and "\n" not in str(failed.value)


def test_two_processes_that_differ_fail_the_check_of_determinism() -> None:
    elsewhere = found("determinism", f"{FAULTY}:Sound")
    with pytest.raises(CheckError, match=r"^two processes with the same seed and actions differ: step 1, messages: "):
        found("determinism", f"{FAULTY}:Hashed", elsewhere)


def test_episodes_that_are_not_deterministic_are_not_compared() -> None:
    note = {"note": "without comparison: it is not deterministic"}
    assert found("concurrency", f"{FAULTY}:Random", {"deterministic": False}) == note
    assert found("cancellation", f"{FAULTY}:Random", {"deterministic": False}) == {}


def test_the_first_difference_names_step_and_field() -> None:
    one = [{"messages": []}, {"messages": [], "reward": 0.5}]
    assert first_difference(one, one) == ""
    assert first_difference(one, [one[0], {**one[1], "reward": 1.0}]) == "step 1, reward: 0.5 and 1.0"
    assert first_difference(one, one[:1]) == "step 1, which only one of them has"


def test_info_may_differ_and_is_not_compared() -> None:
    episodes = [found("determinism", f"{FAULTY}:Sound")["observations"] for _ in range(2)]
    assert episodes[0] == episodes[1] and "info" not in episodes[0][1], "it has the time"
