"""An episode: the policy and an environment answer each other until the environment, or a limit, ends it.

An attempt at an episode may fail because of its environment, and its sampler may die. Where the environment's class
says that it can (`resume`), the next attempt goes on from the state that rollout/environments/journal.py keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from tandem.protos.contracts import Environment, Message, StepResult
from tandem.protos.errors import EpisodeError, UnavailableError
from tandem.protos.types import Prompt, SamplingParameters, Trajectory, task_of
from tandem.rollout.environments.chat_messages import for_template
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.intents import (
    Save,
    UnrepeatableError,
    calls_one_of,
    check_repeatable,
    unscored_row,
)
from tandem.rollout.environments.journal import Episode, finished_row, saved_episode, unfinished_row
from tandem.rollout.environments.limits import (
    LIMITS,
    STOPS,
    Limits,
    Stop,
    TurnTimeError,
    in_time,
    longest_turn,
    with_policy,
)
from tandem.rollout.environments.source import EnvironmentSource, OpenEnvironment
from tandem.rollout.environments.tools.outcomes import ToolFigures
from tandem.rollout.environments.turn_encoder import TurnEncoder
from tandem.rollout.sampler import Sampler
from tandem.rollout.segments import unsampled, with_given

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5  # before another attempt: the environment's server may be away for a moment
_LONGEST_PAUSE_SECONDS = 10.0
_SHORT_WAIT_SECONDS = 0.2  # an environment that answers sooner does not give up its place for its answers


@dataclass(slots=True)
class EpisodeFigures:
    """Sums since the sampler's start."""

    resumed_episodes: int = 0
    differing_episodes: int = 0
    """Their environment, made to repeat what it had done, showed something else: they began anew."""
    unscored_episodes: int = 0
    """They called an unsafe tool and could not go on, all attempts failed, nothing was sampled, or
    `environment.policies` says so.
    """
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STOPS, 0))
    """Episodes by what ended them."""


@dataclass(slots=True, eq=False)
class RunningEpisode:
    """A trajectory that is wanted. `episode` is what the next attempt goes on with; None: it begins anew."""

    prompt: Prompt
    sampling: SamplingParameters
    trajectory_id: int
    on_change: Callable[[], None]
    save: Save | None
    episode: Episode | None = None
    waiting_since: float = inf
    """Monotonic time since which its environment works and it has no request in the engine; inf: it has one."""

    @property
    def name(self) -> str:
        return f"{self.prompt.group_id}/{self.trajectory_id}"


class EpisodeSampler:
    """Samples trajectories of several turns on a sampler. All methods belong to the sampler's event loop.

    `seed` is the run's. All trajectories of a group meet the same environment, with the same task and seed.
    """

    def __init__(
        self, sampler: Sampler, pool: EnvironmentSource, encoder: TurnEncoder, config: EnvironmentConfig, seed: int
    ) -> None:
        self.figures = EpisodeFigures()
        self.others: dict[str, EpisodeSampler] = {}  # with other environments, by what requests name them
        self.tools = ToolFigures(schema["function"]["name"] for schema in pool.tools)
        self._sampler = sampler
        self._pool = pool
        self._encoder = encoder
        self._config = config
        self._seed = seed
        self._saved: set[RunningEpisode] = set()
        self._tool_names = {schema["function"]["name"] for schema in pool.tools}

    @property
    def num_waiting(self) -> int:
        """Running episodes that have waited for their environment for a while, and use nothing of the engine."""
        return sum(time.monotonic() - one.waiting_since > _SHORT_WAIT_SECONDS for one in self._saved)

    @property
    def can_move(self) -> bool:
        """Whether another sampler may go on with an episode at any time, after its last saved turn."""
        return self._pool.resume != "restart" and not self._pool.unsafe_tools

    async def sample(
        self,
        prompt: Prompt,
        sampling: SamplingParameters,
        trajectory_id: int,
        *,
        unfinished: Trajectory | None = None,
        on_change: Callable[[], None] | None = None,
        save: Save | None = None,
    ) -> Trajectory:
        """One trajectory. An `unfinished` one, from `unfinished` of any sampler, goes on if its environment can.
        `on_change` is called whenever `unfinished` has more of it, which it has only with an `on_change`. Unsafe tools
        are called only with a `save`, whose errors are raised; an episode that cannot go on after that is returned with
        finish reason "error".

        Raises EpisodeError if every attempt failed because of the environment, DataError if the prompt cannot be used,
        UnavailableError once the engine has ended.
        """
        running = RunningEpisode(prompt, sampling, trajectory_id, on_change or (lambda: None), save)
        if unfinished is not None:
            saved = saved_episode(unfinished, prompt)
            running.episode = saved if self._pool.resume != "restart" or saved.intents else None
        if on_change is not None:
            self._saved.add(running)
        try:
            for attempt in range(1, self._config.max_attempts):
                try:
                    return await self._attempt(running)
                except EpisodeError as error:
                    words = (running.name, attempt, self._config.max_attempts, error)
                    log.warning("episode %s, attempt %d of %d: %s", *words, extra={"group": prompt.group_id})
                await asyncio.sleep(min(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), _LONGEST_PAUSE_SECONDS))
            return await self._attempt(running)
        except (EpisodeError, UnrepeatableError) as error:
            if (lost := running.episode) is None or not lost.intents:
                raise
            self.figures.unscored_episodes += 1
            log.warning("episode %s gets no score: %s", running.name, error, extra={"group": prompt.group_id})
            return unscored_row(lost, prompt, sampling, trajectory_id, str(error))
        finally:
            self._saved.discard(running)

    def failed(
        self, prompt: Prompt, sampling: SamplingParameters, trajectory_id: int, error: EpisodeError
    ) -> Trajectory:
        """An episode whose attempts have all failed, without a score and with finish reason "error"."""
        self.figures.unscored_episodes += 1
        log.warning("episode %s/%d gets no score: %s", prompt.group_id, trajectory_id, error)
        told = {"unscored": str(error), "num_turns": 0, "messages": prompt.messages}
        given = (unsampled(prompt.token_ids),)
        return Trajectory(trajectory_id, "policy", given, "error", "", sampling, metadata=told)

    async def unfinished(self, group_ids: Collection[str]) -> dict[tuple[str, int], Trajectory]:
        """Returns the running episodes of these groups that can go on, by group and trajectory id.

        Their finish reason is "abort". Raises UnavailableError once the engine has ended.
        """
        asked = [one for one in self._saved if one.prompt.group_id in group_ids]
        sampled = await self._sampler.unfinished({_turn_key(one.prompt, one.episode) for one in asked if one.episode})
        rows = {}
        for one in asked:
            if one.episode is not None:  # each may have changed meanwhile
                begun = sampled.get((_turn_key(one.prompt, one.episode), one.trajectory_id))
                row = unfinished_row(one.episode, one.prompt, one.sampling, one.trajectory_id, begun)
                rows[one.prompt.group_id, one.trajectory_id] = row
        return rows

    async def _attempt(self, running: RunningEpisode) -> Trajectory:
        running.waiting_since = time.monotonic()
        if (episode := running.episode) is not None:
            check_repeatable(episode, self._pool.resume)
            async with self._opened(episode.episode_id) as environment:
                if not episode.intents:
                    running.episode = None  # if it does not get back to its turn, the next attempt begins anew
                if await self._go_back(environment, episode, running):
                    return await self._play(environment, episode, running)
                if episode.intents:
                    raise UnrepeatableError("its environment cannot go on, and an unsafe tool was called")
        episode_id = f"{running.name}/{uuid.uuid4().hex}"
        async with self._opened(episode_id) as environment:
            episode = await self._begin(environment, running.prompt, episode_id)
            return await self._play(environment, episode, running)

    @contextlib.asynccontextmanager
    async def _opened(self, episode_id: str) -> AsyncIterator[OpenEnvironment]:
        environment = await self._pool.open(episode_id)
        try:
            yield environment
        finally:
            with contextlib.suppress(EpisodeError):  # what it did is known; its process frees the rest
                await environment.close()

    async def _begin(self, environment: OpenEnvironment, prompt: Prompt, episode_id: str) -> Episode:
        observation = await environment.reset(task_of(prompt), seed=self._seed_of(prompt), episode_id=episode_id)
        messages = [*prompt.messages, *observation.messages]
        is_prompt = not observation.messages and not self._encoder.shows_tools
        history = unsampled(prompt.token_ids if is_prompt else self._encoder.encode(messages))
        episode = Episode(episode_id, history, messages, num_given=len(history.ids))
        episode.snapshot = await self._snapshot(environment)
        return episode

    def _seed_of(self, prompt: Prompt) -> int:
        return environment_seed(self._seed, prompt.group_id)

    async def _snapshot(self, environment: OpenEnvironment) -> bytes | None:
        return await environment.snapshot() if self._pool.resume == "snapshot" else None

    async def _go_back(self, environment: OpenEnvironment, episode: Episode, running: RunningEpisode) -> bool:
        """Brings a new environment to where the episode is. Returns False if it cannot or shows something else."""
        how, words = self._pool.resume, (running.name, len(episode.rewards))
        if how == "replay" and not await self._repeats(environment, episode, running.prompt):
            self.figures.differing_episodes += 1
            told = "episode %s begins anew: its environment differed when its %d steps were repeated"
            log.warning(told, *words, extra={"group": running.prompt.group_id})
            return False
        if how == "snapshot":
            if episode.snapshot is None:  # saved before the class had snapshots
                return False
            await environment.restore(episode.snapshot)
        self.figures.resumed_episodes += 1
        episode.resumed_at.append(len(episode.rewards))
        log.info("episode %s goes on after %d steps (%s)", *words, how, extra={"group": running.prompt.group_id})
        return True

    async def _repeats(self, environment: Environment, episode: Episode, prompt: Prompt) -> bool:
        """Repeats all answered turns. Returns whether the environment showed what is in the episode."""
        expected, *answers = episode.observations(len(prompt.messages))
        seed, episode_id = self._seed_of(prompt), episode.episode_id
        observation = await environment.reset(task_of(prompt), seed=seed, episode_id=episode_id)
        if [*observation.messages] != expected:
            return False
        for turn, answer in enumerate(answers):
            result = await self._step(environment, episode, turn)
            shown = ([*result.messages], result.reward, result.terminated or result.truncated)
            if shown != (answer, episode.rewards[turn][1], False):
                return False
        return True

    async def _step(self, environment: Environment, episode: Episode, turn: int) -> StepResult:
        deadline = time.time() + self._config.step_seconds
        key = episode.idempotency_key(turn)
        result = await environment.step(episode.action(turn), deadline=deadline, idempotency_key=key)
        self.tools.add(result.tool_outcomes)
        return result

    async def _play(self, environment: OpenEnvironment, episode: Episode, running: RunningEpisode) -> Trajectory:
        """Plays the episode to its end."""
        if self._pool.resume != "restart":
            running.episode = episode
        limits = Limits(self._config)
        while (stop := await self._advance(environment, episode, running, limits)) is None:
            if running.episode is not None:
                running.on_change()
        running.episode = None  # it has ended
        if stop in LIMITS and episode.turns:
            await self._earn_at_limit(environment, episode, running)
        return self._ended(finished_row(episode, stop, running.sampling, running.trajectory_id))

    async def _earn_at_limit(self, environment: OpenEnvironment, episode: Episode, running: RunningEpisode) -> None:
        try:
            reward = await environment.final_reward()
        except EpisodeError as error:
            if episode.intents:
                running.episode = episode  # it gets no score, but it is kept
                raise UnrepeatableError(f"{error}, and an unsafe tool was called") from None
            raise
        if reward:
            episode.earn(reward)

    def _ended(self, row: Trajectory) -> Trajectory:
        """Counts a trajectory whose episode has ended, and applies the recipe's policy."""
        row = with_policy(row, self._config)
        self.figures.ended[row.metadata["stop"]] += 1
        self.figures.unscored_episodes += "unscored" in row.metadata
        return row

    async def _advance(
        self, environment: OpenEnvironment, episode: Episode, running: RunningEpisode, limits: Limits
    ) -> Stop | None:
        """Samples or answers a turn. Returns why the episode ends, None if it goes on."""
        if episode.awaits_answer:
            return await self._answer_turn(environment, episode, running, limits)
        return await self._sample_turn(episode, running, limits)

    async def _sample_turn(self, episode: Episode, running: RunningEpisode, limits: Limits) -> Stop | None:
        turn, begins_at = len(episode.turns), len(episode.history.ids)
        in_episode = running.sampling.max_tokens - episode.num_tokens
        in_context = self._sampler.max_model_tokens - begins_at
        if (stop := limits.before_turn(turn, longest_turn(in_episode, in_context))) is not None:
            return stop
        longest, cut = longest_turn(in_episode, in_context, self._config.max_turn_tokens)
        seconds, late = limits.turn_seconds()
        try:
            row = await self._sample_in_time(episode, running, longest, seconds, late)
        except TurnTimeError as error:
            return error.stop
        (episode.history,) = row.segments
        episode.begun = None
        episode.actions.append(len(episode.messages))
        episode.turns.append(row.text)
        if row.finish_reason == "length":  # it may lack its most important part
            episode.messages.append({"role": "assistant", "content": row.text})
            return cut
        episode.messages.append(self._encoder.decode_turn(episode.history.ids[begins_at:], row.text, turn))
        return limits.after_turn([episode.messages[place] for place in episode.actions], self._tool_names)

    async def _sample_in_time(
        self, episode: Episode, running: RunningEpisode, longest: int, seconds: float | None, late: Stop
    ) -> Trajectory:
        """Raises TurnTimeError with `late` if the turn is not sampled within `seconds`."""
        running.waiting_since = inf
        async with in_time(seconds, late):
            row = await self._sampler.sample_one(
                episode.history,
                replace(running.sampling, max_tokens=longest),
                trajectory_id=running.trajectory_id,
                key=_turn_key(running.prompt, episode),
                unfinished=episode.begun,
            )
        running.waiting_since = time.monotonic()
        if row.finish_reason in ("abort", "error"):
            told = f"the engine ended turn {len(episode.turns)} of {running.prompt.group_id}"
            raise UnavailableError(f"{told} with {row.finish_reason!r}")
        return row

    async def _save_intent(self, episode: Episode, running: RunningEpisode) -> None:
        """Before a turn with calls of unsafe tools is carried out."""
        turn = len(episode.rewards)
        if running.save is None:
            raise EpisodeError(f"turn {turn} of {running.name} calls an unsafe tool, and the episode is not saved")
        episode.intents.append(turn)
        running.episode = episode
        await running.save(unfinished_row(episode, running.prompt, running.sampling, running.trajectory_id, None))

    async def _answer_turn(
        self, environment: OpenEnvironment, episode: Episode, running: RunningEpisode, limits: Limits
    ) -> Stop | None:
        if calls_one_of(episode.action(len(episode.rewards)), self._pool.unsafe_tools):
            await self._save_intent(episode, running)
        result = await self._step(environment, episode, len(episode.rewards))
        has_ended, last = result.terminated or result.truncated, episode.last_token
        if not has_ended:
            snapshot = await self._snapshot(environment)
            self._show(episode, result.messages)
            episode.snapshot = snapshot
        episode.messages += result.messages
        episode.info = result.info
        episode.rewards.append((last, result.reward))
        if has_ended:
            return "terminated" if result.terminated else "truncated"
        return limits.after_step(result.tool_outcomes)

    def _show(self, episode: Episode, messages: Sequence[Message]) -> None:
        """Puts the environment's messages before the next turn. Changes nothing if the template refuses them."""
        ids = episode.history.ids
        if self._config.rewritten_history == "keep":
            episode.history = with_given(episode.history, self._encoder.encode_reply(messages, int(ids[-1])))
            return
        conversation = for_template([*episode.messages, *messages])
        increment = self._encoder.encode_increment(conversation, ids)
        if increment is None:
            episode.fork(unsampled(self._encoder.encode(conversation)))
        else:
            episode.history = with_given(episode.history, increment)


def environment_seed(run_seed: int, group_id: str) -> int:
    """The seed of the environments of a group."""
    digest = hashlib.blake2b(f"{run_seed}/{group_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1  # numpy's and gym's seeds have 31 bits


def turn_key(group_id: str, turn: int) -> str:
    """The sampler's key of a turn, counted from 0."""
    return f"{group_id}/{turn}"


def _turn_key(prompt: Prompt, episode: Episode) -> str:
    return turn_key(prompt.group_id, len(episode.turns))
