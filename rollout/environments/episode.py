"""An episode: the policy and an environment answer each other until the environment, or a limit, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.protos.contracts import Environment, JsonObject, Message
from tandem.protos.errors import EpisodeError, UnavailableError
from tandem.protos.types import Prompt, SamplingParameters, Segment, Trajectory
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import EnvironmentPool
from tandem.rollout.sampler import Sampler
from tandem.rollout.segments import first_tokens, unsampled, with_given

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5  # before another attempt: the environment's server may be away for a moment
_LONGEST_PAUSE_SECONDS = 10.0

Stop = Literal["terminated", "truncated", "turns", "length"]
"""Why an episode ended: the environment said so (twice), `max_turns`, or no token was left."""


class TurnEncoder(Protocol):
    """Turns messages into token ids by the model's chat template. Raises EpisodeError if it refuses them."""

    def encode(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Token ids (T,) of a conversation up to the start of the policy's first turn."""
        ...

    def encode_reply(self, messages: Sequence[Message], last_token: int) -> NDArray[np.int32]:
        """Token ids (T,) from the end of the policy's turn, whose last token is given, to the start of its next one."""
        ...


@dataclass(slots=True)
class _Episode:
    """What has happened so far. `messages` are all of the conversation, `turns` the texts of the policy's turns.
    `rewards`: (index of a turn's last token, what the turn earned).
    """

    episode_id: str
    history: Segment
    messages: list[Message]
    num_given: int = field(init=False)
    """Tokens before the first turn."""
    turns: list[str] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    info: JsonObject = field(default_factory=dict)
    """Of the last step."""

    def __post_init__(self) -> None:
        self.num_given = len(self.history.ids)

    @property
    def num_tokens(self) -> int:
        """Tokens since the first turn began, the environment's included."""
        return len(self.history.ids) - self.num_given


class EpisodeSampler:
    """Samples trajectories of several turns on a sampler. All methods belong to the sampler's event loop.

    `seed` is the run's. All trajectories of a group meet the same environment, with the same task and seed.
    """

    def __init__(
        self, sampler: Sampler, pool: EnvironmentPool, encoder: TurnEncoder, config: EnvironmentConfig, seed: int
    ) -> None:
        self._sampler = sampler
        self._pool = pool
        self._encoder = encoder
        self._config = config
        self._seed = seed

    async def sample(self, prompt: Prompt, sampling: SamplingParameters, trajectory_id: int) -> Trajectory:
        """One trajectory.

        Raises EpisodeError if every attempt failed because of the environment, DataError if the prompt cannot be used,
        UnavailableError once the engine has ended.
        """
        name = f"{prompt.group_id}/{trajectory_id}"
        for attempt in range(1, self._config.max_attempts):
            try:
                return await self._attempt(prompt, sampling, trajectory_id, f"{name}/{uuid.uuid4().hex}")
            except EpisodeError as error:
                words = (name, attempt, self._config.max_attempts, error)
                log.warning("episode %s, attempt %d of %d: %s", *words, extra={"group": prompt.group_id})
            await asyncio.sleep(min(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS))
        return await self._attempt(prompt, sampling, trajectory_id, f"{name}/{uuid.uuid4().hex}")

    async def _attempt(
        self, prompt: Prompt, sampling: SamplingParameters, trajectory_id: int, episode_id: str
    ) -> Trajectory:
        environment = await self._pool.open(episode_id)
        try:
            episode = await self._begin(environment, prompt, episode_id)
            stop = await self._play(environment, episode, prompt, sampling, trajectory_id)
        finally:
            with contextlib.suppress(EpisodeError):  # what it did is known; its process frees the rest
                await environment.close()
        return self._trajectory(episode, stop, sampling, trajectory_id)

    async def _begin(self, environment: Environment, prompt: Prompt, episode_id: str) -> _Episode:
        digest = hashlib.blake2b(f"{self._seed}/{prompt.group_id}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little") >> 1  # numpy's and gym's seeds have 31 bits
        observation = await environment.reset(prompt.row, seed=seed, episode_id=episode_id)
        messages = [*prompt.messages, *observation.messages]
        history = unsampled(self._encoder.encode(messages) if observation.messages else prompt.token_ids)
        return _Episode(episode_id, history, messages)

    async def _play(
        self,
        environment: Environment,
        episode: _Episode,
        prompt: Prompt,
        sampling: SamplingParameters,
        trajectory_id: int,
    ) -> Stop:
        """Plays the episode to its end, and says why it ended."""
        for turn in range(self._config.max_turns):
            left = self._tokens_left(episode, sampling)
            if turn > 0 and left < 1:
                return "length"
            fitting = replace(sampling, max_tokens=min(left, self._config.max_turn_tokens or left))
            key = f"{prompt.group_id}/{turn}"
            row = await self._sampler.sample_one(episode.history, fitting, trajectory_id=trajectory_id, key=key)
            (episode.history,) = row.segments
            if row.finish_reason in ("abort", "error"):
                raise UnavailableError(f"the engine ended turn {turn} of {prompt.group_id} with {row.finish_reason!r}")
            action = {"role": "assistant", "content": row.text}
            episode.messages.append(action)
            episode.turns.append(row.text)
            if row.finish_reason == "length":  # it may lack its most important part
                return "length"
            result = await environment.step(
                action,
                deadline=time.time() + self._config.step_seconds,
                idempotency_key=f"{episode.episode_id}/{turn}",
            )
            episode.messages += result.messages
            episode.info = result.info
            episode.rewards.append((len(episode.history.ids) - 1, result.reward))
            if result.terminated or result.truncated:
                return "terminated" if result.terminated else "truncated"
            reply = self._encoder.encode_reply(result.messages, int(episode.history.ids[-1]))
            episode.history = with_given(episode.history, reply)
        return "turns"

    def _tokens_left(self, episode: _Episode, sampling: SamplingParameters) -> int:
        in_model = self._sampler.max_model_tokens - len(episode.history.ids)
        return min(sampling.max_tokens - episode.num_tokens, in_model)

    def _trajectory(
        self, episode: _Episode, stop: Stop, sampling: SamplingParameters, trajectory_id: int
    ) -> Trajectory:
        """Given tokens after the last turn are left out."""
        history = episode.history
        length = len(history.ids) - int(history.loss_mask[::-1].argmax())
        rewards = np.zeros(length, np.float32)
        for last, reward in episode.rewards:
            rewards[last] = reward
        return Trajectory(
            trajectory_id,
            "policy",
            (first_tokens(history, length),),
            "length" if stop == "length" else "stop",
            "\n".join(episode.turns),
            sampling,
            earned_reward=float(sum(reward for _, reward in episode.rewards)),
            metadata={
                "stop": stop,
                "num_turns": len(episode.turns),
                "messages": episode.messages,
                "info": episode.info,
            },
            token_rewards=(rewards,) if rewards.any() else None,
        )
