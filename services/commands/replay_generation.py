"""`tandem replay --generation`: samples the recorded trajectories again while a replay trains, each turn by the version
that sampled it, and repeats recorded episodes on their environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from tandem.protos.codec import decode_group
from tandem.protos.errors import ConfigError, EpisodeError
from tandem.protos.scratch_folder import ScratchFolder
from tandem.protos.types import Prompt, ScoredTrajectory, Trajectory, WeightManifest
from tandem.rollout.engine import find_engine
from tandem.rollout.environments.episode import environment_seed, turn_key
from tandem.rollout.environments.process import EnvironmentPool
from tandem.rollout.environments.repetition import ObservationDifference, first_other_observation
from tandem.rollout.recorded_turns import (
    RecordedTurn,
    TokenDifference,
    first_difference,
    largest_logprob_difference,
    recorded_turns,
)
from tandem.rollout.sampler import Sampler
from tandem.services.config import Recipe
from tandem.services.rollout.service import sampler_arguments
from tandem.services.run.placement import gpu_ids, place_on_cores, set_allocator
from tandem.trainer.batch.record import read_record
from tandem.trainer.weight_sender import WeightSender

_POLL_SECONDS = 1.0  # the other ranks wait in a collective meanwhile

State = Literal["samples", "equal", "different"]


@dataclass(frozen=True, slots=True)
class _Row:
    """A recorded trajectory."""

    batch: int
    """The version that was trained on it."""
    prompt: Prompt
    trajectory: Trajectory

    @property
    def name(self) -> str:
        return f"batch {self.batch}, group {self.prompt.group_id}, trajectory {self.trajectory.trajectory_id}"


def check_comparable(recipe: Recipe) -> None:
    """Raises ConfigError if the same weights do not give the same log-probs again."""
    if recipe.trainer.dtype != "float32" or gpu_ids():
        where = "on a GPU" if gpu_ids() else f"in {recipe.trainer.dtype}"
        raise ConfigError(
            f"--generation: {where}, a log-prob depends on what is sampled at the same time; only runs in float32 on "
            "CPUs can be compared, replay this one without --generation"
        )


def repeat_episodes(folder: Path, recipe: Recipe, versions: Sequence[int]) -> tuple[bool, str]:
    """Repeats the recorded episodes of these batches on the recipe's environment. Returns whether all showed the same
    again, and a line that says it or names the first difference.

    Raises ConfigError if the environment's class cannot be used.
    """
    return asyncio.run(_repeat_episodes(folder, recipe, versions))


async def _repeat_episodes(folder: Path, recipe: Recipe, versions: Sequence[int]) -> tuple[bool, str]:
    pool, number = EnvironmentPool(recipe.environment), 0
    rows = (row for version in versions for row in _read_rows(folder, version))
    try:
        await pool.start()
        if pool.is_agent:
            raise ConfigError("replay: --generation knows no agents; the order of their calls is not recorded")
        if pool.resume != "replay":
            told = f"its class's resume is {pool.resume!r}, not 'replay'"
            return True, f"no episode repeated on the environment: {told}"
        while some := [*islice(rows, sampler_arguments(recipe).max_rows)]:
            differences = await asyncio.gather(*(_repeat(pool, recipe, row) for row in some))
            for row, difference in zip(some, differences, strict=True):
                if difference is not None:
                    return False, f"{row.name}: {difference}"
            number += len(some)
    finally:
        await pool.close()
    return True, f"{number} episodes repeated on the environment: no observation differs"


async def _repeat(pool: EnvironmentPool, recipe: Recipe, row: _Row) -> ObservationDifference | None:
    group_id = row.prompt.group_id
    episode_id = row.trajectory.metadata.get("episode_id", f"{group_id}/{row.trajectory.trajectory_id}")
    environment = await pool.open(episode_id)
    try:
        return await first_other_observation(
            environment,
            row.prompt,
            row.trajectory,
            seed=environment_seed(recipe.run.seed, group_id),
            episode_id=episode_id,
            step_seconds=recipe.environment.step_seconds,
        )
    finally:
        with contextlib.suppress(EpisodeError):  # what it showed is known
            await environment.close()


class Generation:
    """The sampler beside a replay, on rank 0. It starts before the learner, because an engine may be forked.

    Raises ConfigError and as `Engine.start`.
    """

    def __init__(self, folder: Path, recipe: Recipe, first: int, versions: Sequence[int]) -> None:
        self.difference = ""
        self._folder = folder
        self._recipe = recipe
        self._arguments = sampler_arguments(recipe)
        self._batches_of: dict[int, list[int]] = {}  # by the version that sampled turns of them
        self._num_trajectories = self._num_turns = self._num_tokens = 0
        self._num_older = self._num_later = 0  # tokens that are not compared
        self._largest = 0.0
        self._has_weights = False
        self._sampling: asyncio.Task[str] | None = None
        self._count(first, versions)
        set_allocator("rollout")
        os.environ.update(place_on_cores(recipe, "rollout-0"))  # as in the run
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM writes to standard output
        with ExitStack() as stack:
            self._scratch = stack.enter_context(ScratchFolder("replay"))
            self._runner = stack.enter_context(asyncio.Runner())
            engine = find_engine(recipe.rollout.engine)
            self._sampler: Sampler = self._runner.run(engine.start(self._arguments))
            stack.callback(self._sampler.close)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def _count(self, first: int, versions: Sequence[int]) -> None:
        """Finds out what is to be sampled, once the weights of a version are there, from version `first` on."""
        for batch in versions:
            for row in _read_rows(self._folder, batch):
                turns = [*recorded_turns(row.trajectory)]
                compared = [turn for turn in turns if turn.policy_version >= first]
                self._num_trajectories += bool(compared)
                self._num_turns += len(compared)
                self._num_tokens += sum(len(turn.ids) for turn in compared)
                self._num_later += sum(turn.num_later for turn in turns)
                self._num_older += sum(len(turn.ids) for turn in turns if turn.policy_version < first)
                for version in {turn.policy_version for turn in compared}:
                    batches = self._batches_of.setdefault(version, [])
                    batches += [batch] if batch not in batches else []

    def needs(self, version: int) -> bool:
        """Whether this version sampled any turn."""
        return version in self._batches_of

    def begin(self, sender: WeightSender) -> None:
        """Begins to sample what the version in the sender's copy sampled."""
        brings_base = sender.copy.manifest.adapters is not None and not self._has_weights
        manifest = sender.write_copy(self._scratch / "weights", brings_base=brings_base)
        self._has_weights = True
        self._sampling = self._runner.get_loop().create_task(self._sample(manifest))

    def state(self) -> State:
        """Goes on for a while."""
        assert self._sampling is not None, "it has begun"
        self._runner.run(_wait_for(self._sampling))
        if not self._sampling.done():
            return "samples"
        self.difference = self._sampling.result()
        return "different" if self.difference else "equal"

    def summary(self) -> str:
        compared = f"{self._num_trajectories} trajectories, {self._num_turns} turns, {self._num_tokens:,} tokens"
        reasons = {
            "of versions whose weights are no longer kept": self._num_older,
            "sampled after the weights changed within their turn": self._num_later,
        }
        others = "; ".join(f"{number:,} tokens {reason}" for reason, number in reasons.items() if number)
        told = f"{compared} sampled again: no difference (log-probs to {self._largest:.1e})"
        return f"{told}; not compared: {others}" if others else told

    async def _sample(self, manifest: WeightManifest) -> str:
        """The first difference; "" if there is none."""
        await self._sampler.update_weights(manifest, "", self._recipe.weights.deadline_seconds)
        version = manifest.policy_version
        own = (
            (row, turn)
            for batch in self._batches_of[version]
            for row in _read_rows(self._folder, batch)
            for turn in recorded_turns(row.trajectory)
            if turn.policy_version == version
        )
        while some := [*islice(own, self._arguments.max_rows)]:
            differences = await asyncio.gather(*(self._sample_turn(row, turn) for row, turn in some))
            for (row, turn), difference in zip(some, differences, strict=True):
                if difference is not None:
                    return f"{row.name}, turn {turn.number}, sampled by version {version}: {difference}"
        return ""

    async def _sample_turn(self, row: _Row, turn: RecordedTurn) -> TokenDifference | None:
        group_id = row.prompt.group_id
        sampled = await self._sampler.sample_one(
            turn.history_ids,
            replace(row.trajectory.sampling, max_tokens=len(turn.ids)),
            trajectory_id=row.trajectory.trajectory_id,
            key=turn_key(group_id, turn.number) if self._recipe.environment.path else group_id,
        )
        (segment,) = sampled.segments
        difference = first_difference(turn, segment)
        if difference is None:
            self._largest = max(self._largest, largest_logprob_difference(turn, segment))
        return difference


def _read_rows(folder: Path, batch: int) -> Iterator[_Row]:
    """The rows of a recorded batch that were sampled to their end, in its order."""
    for payload in read_record(folder, batch)[1].values():
        group = decode_group(payload)
        trajectories = (row.trajectory if isinstance(row, ScoredTrajectory) else row for row in group.rows)
        yield from (_Row(batch, group.prompt, one) for one in trajectories if one.finish_reason in ("stop", "length"))


async def _wait_for(sampling: asyncio.Task[str]) -> None:
    await asyncio.wait({sampling}, timeout=_POLL_SECONDS)
