"""The state of an episode, the trajectory that it becomes, and the unfinished one that it is saved as.

An episode is saved between two changes, so that it goes on after the death of its sampler or of its environment's
process: every sampled token is in it once, and so is every step of the environment.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from tandem.protos.contracts import JsonObject, Message
from tandem.protos.types import Prompt, SamplingParameters, Segment, Trajectory
from tandem.rollout.environments.limits import LENGTH_STOPS, Stop
from tandem.rollout.segments import first_tokens, without_unread

_KEY = "episode"  # of the metadata of an unfinished trajectory


@dataclass(slots=True)
class Episode:
    """What has happened so far. The environment has answered all turns, or all but the last."""

    episode_id: str
    history: Segment
    """All tokens before the next turn; up to the end of the last turn while the environment has not answered it. After
    a fork, those of the present segment.
    """
    messages: list[Message]
    """The whole conversation."""
    num_given: int
    """Tokens before the first turn."""
    earlier: list[Segment] = field(default_factory=list)
    """Segments that ended in a fork, each up to its last sampled token."""
    actions: list[int] = field(default_factory=list)
    """Where in `messages` the policy's are."""
    turns: list[str] = field(default_factory=list)
    """The texts of the policy's turns."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """Of each answered turn: index of its last token, counted over all segments, and what it earned."""
    info: JsonObject = field(default_factory=dict)
    """Of the last step."""
    snapshot: bytes | None = None
    """The environment's state after its last answer, if it can be restored."""
    begun: Trajectory | None = None
    """History and the first tokens of the next turn, if an earlier sampler was interrupted in the middle of it."""
    resumed_at: list[int] = field(default_factory=list)
    """Where the episode went on after an interruption: the number of turns that were answered before."""

    intents: list[int] = field(default_factory=list)
    """Turns that call an unsafe tool. Each is here before its call is made."""

    @property
    def num_tokens(self) -> int:
        """The larger of two numbers: tokens since the first turn began, the environment's included; and all sampled
        tokens, of which a fork may have left out some.
        """
        num_sampled = sum(segment.num_loss_tokens for segment in (*self.earlier, self.history))
        return max(len(self.history.ids) - self.num_given, num_sampled)

    @property
    def last_token(self) -> int:
        """Index of the last token so far, counted over all segments."""
        return sum(len(segment.ids) for segment in self.earlier) + len(self.history.ids) - 1

    @property
    def awaits_answer(self) -> bool:
        """Whether the environment has yet to answer the last turn."""
        return len(self.turns) > len(self.rewards)

    def fork(self, prompt: Segment) -> None:
        """Goes on in a new segment, which begins with the given tokens of `prompt`."""
        self.earlier.append(without_unread(self.history))
        self.history = prompt

    def earn(self, reward: float) -> None:
        """By the last turn, after its end."""
        if not self.awaits_answer:
            last, before = self.rewards.pop()
            self.rewards.append((last, before + reward))
        else:
            self.rewards.append((self.last_token, reward))

    def segments(self) -> tuple[Segment, ...]:
        """All segments. Tokens that no turn of the policy has read are left out."""
        last = (without_unread(self.history),) if self.history.num_loss_tokens else ()
        return (*self.earlier, *last)

    def action(self, turn: int) -> Message:
        return self.messages[self.actions[turn]]

    def observations(self, num_prompt_messages: int) -> list[Sequence[Message]]:
        """The environment's messages: those of `reset`, then those that answer each turn."""
        starts = [num_prompt_messages - 1, *self.actions, len(self.messages)]
        observed = [self.messages[before + 1 : after] for before, after in pairwise(starts)]
        return [*observed[: 1 + len(self.rewards)]]

    def idempotency_key(self, turn: int) -> str:
        """Names a step in all attempts. A turn that was lost and sampled anew may be another action, which is no
        repetition.
        """
        action = json.dumps(self.action(turn), sort_keys=True)
        return f"{self.episode_id}/{turn}/{hashlib.blake2b(action.encode(), digest_size=8).hexdigest()}"


def finished_row(episode: Episode, stop: Stop, sampling: SamplingParameters, trajectory_id: int) -> Trajectory:
    """The episode as a trajectory that has ended. What no turn has read is left out, unless nothing was sampled."""
    segments = episode.segments() or (episode.history,)
    ends = np.cumsum([len(segment.ids) for segment in segments])
    rewards = np.zeros(ends[-1], np.float32)
    for last, reward in episode.rewards:
        rewards[last] = reward
    return Trajectory(
        trajectory_id,
        "policy",
        segments,
        "length" if stop in LENGTH_STOPS else "stop",
        "\n".join(episode.turns),
        sampling,
        earned_reward=float(sum(reward for _, reward in episode.rewards)),
        metadata={
            "episode_id": episode.episode_id,
            "stop": stop,
            "num_turns": len(episode.turns),
            "messages": episode.messages,
            "info": episode.info,
            "resumed_at": episode.resumed_at,
        },
        token_rewards=tuple(np.split(rewards, ends[:-1])) if rewards.any() else None,
    )


def unfinished_row(
    episode: Episode, prompt: Prompt, sampling: SamplingParameters, trajectory_id: int, begun: Trajectory | None
) -> Trajectory:
    """The episode as an unfinished trajectory. `begun`: history and what is sampled of the next turn."""
    begun = begun or episode.begun
    saved = {
        "episode_id": episode.episode_id,
        "num_tokens": len(episode.history.ids),
        "messages": [dict(message) for message in episode.messages[len(prompt.messages) :]],
        "num_given": episode.num_given,
        "actions": [*episode.actions],
        "turns": [*episode.turns],
        "rewards": [*episode.rewards],
        "info": episode.info,
        "snapshot": None if episode.snapshot is None else b64encode(episode.snapshot).decode(),
        "resumed_at": [*episode.resumed_at],
        "intents": [*episode.intents],
    }
    segment = episode.history if begun is None else begun.segments[0]
    segments = (*episode.earlier, segment)
    return Trajectory(trajectory_id, "policy", segments, "abort", "", sampling, metadata={_KEY: saved})


def saved_episode(row: Trajectory, prompt: Prompt) -> Episode:
    """The episode of an unfinished trajectory."""
    saved, (*earlier, segment) = row.metadata[_KEY], row.segments
    return Episode(
        episode_id=saved["episode_id"],
        history=first_tokens(segment, saved["num_tokens"]),
        messages=[*prompt.messages, *saved["messages"]],
        num_given=saved["num_given"],
        earlier=earlier,
        actions=[*saved["actions"]],
        turns=[*saved["turns"]],
        rewards=[(last, reward) for last, reward in saved["rewards"]],
        info=saved["info"],
        snapshot=None if saved["snapshot"] is None else b64decode(saved["snapshot"]),
        begun=replace(row, segments=(segment,)) if len(segment.ids) > saved["num_tokens"] else None,
        resumed_at=[*saved["resumed_at"]],
        intents=[*saved["intents"]],
    )
