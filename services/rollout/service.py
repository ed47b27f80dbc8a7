"""The rollout service: one engine that claims prompts, samples the n trajectories of each group, and completes it.

If the advantage estimator compares with the policy's greedy answer (`trainer.needs_baselines`), every prompt gets an
additional trajectory with role `baseline` and id n, which is sampled, saved and continued like the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from tandem.protos import rollout_pb2_grpc
from tandem.protos.codec import decode_group, encode_group
from tandem.protos.errors import DataError, EpisodeError, TandemError, UnavailableError
from tandem.protos.store_source import StoreSource
from tandem.protos.types import Prompt, Role, Trajectory, TrajectoryGroup
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments, find_engine
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.gather import gather_or_cancel
from tandem.rollout.sampler import Sampler
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.store_source import redis_store
from tandem.services.buffer.types import Claim
from tandem.services.config import Recipe
from tandem.services.group_leases import GroupLeases, GroupResult
from tandem.services.leases import Held, LeaseLoop, LeaseWorker, Release
from tandem.services.logging_setup import configure_logging
from tandem.services.metrics.page import Sources
from tandem.services.metrics.tracing import Attributes, flush_spans, group_span
from tandem.services.process import starting, stop_event
from tandem.services.rollout.episodes import start_episodes
from tandem.services.rollout.server import RPC_LIMITS, SERVICE_NAME, RolloutServicer
from tandem.services.rpc.server import start_server
from tandem.services.run.endpoint import metrics_endpoint, run_buffer, server_security
from tandem.services.service_info import Heartbeat, ServiceInfo

log = logging.getLogger(__name__)

_LEAVE_SECONDS = 60.0  # to finish its groups; it then gives them back with what is sampled of them
_LEAVE_POLL_SECONDS = 0.5
_CHECK_SECONDS = 10.0  # an engine that hangs would keep its leases forever
_COLLECT_SECONDS = 5.0  # to get unfinished answers from the engine, or a third of a short lease
_LAST_COLLECT_SECONDS = 1.0  # at a stop, when the leases have yet to be released
_IDLE_SECONDS = 1.0  # a sampler that waited so long for prompts takes over episodes of one with too many
_INTENT_SECONDS = 30.0  # to save an episode before it calls an unsafe tool
_GROWTH = 1.125
"""Unfinished answers are saved when a group has so many times the tokens that were saved. In all, a group's tokens are
then sent at most 1 / (1 − 1 / 1.125) = 9 times, and once more with each row that finishes between two renewals.
"""

_OVERLOADED = Release("overloaded", "voluntary")


@dataclass(slots=True)
class _Group:
    """A group in work. `rows` has finished rows and, with finish reason "abort", unfinished ones, by trajectory id."""

    prompt: Prompt
    rows: dict[int, Trajectory]
    saved_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.saved_tokens = self.num_tokens

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_loss_tokens for row in self.rows.values() for segment in row.segments)

    def role(self, number: int) -> Role:
        return "policy" if number < self.prompt.num_samples else "baseline"

    def is_finished(self, number: int) -> bool:
        return number in self.rows and self.rows[number].finish_reason != "abort"

    @property
    def payload(self) -> bytes:
        return encode_group(TrajectoryGroup(self.prompt, tuple(self.rows[number] for number in sorted(self.rows))))

    def to_save(self) -> bytes:
        self.saved_tokens = self.num_tokens
        return self.payload


class SamplingWorker(LeaseWorker[Claim, GroupResult]):
    """Samples the missing rows of leased groups, many groups at once.

    `name` is its name in the registry and as holder of leases. With `episodes`, rows have several turns, and a group is
    saved soon after any of them has got further. With `keeps_failed_episodes`, one whose attempts have all failed is a
    row without a score; without it, its group is given back. For `report` see `GroupLeases`.
    """

    runs_in_threads = False

    def __init__(
        self,
        buffer: Buffer,
        engine: Sampler,
        config: RolloutConfig,
        name: str,
        *,
        episodes: EpisodeSampler | None = None,
        with_baselines: bool = False,
        keeps_failed_episodes: bool = False,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._episodes = episodes
        self._engine = engine
        self._buffer = buffer
        self._run_id = buffer.run_id
        self._with_baselines = with_baselines
        self._keeps_failed_episodes = keeps_failed_episodes
        self._rows_per_group = config.samples_per_prompt + with_baselines
        self._partial_rollout = config.partial_rollout
        self._collect_seconds = min(_COLLECT_SECONDS, config.lease_seconds / 3)
        self._groups: dict[int, _Group] = {}  # by the lease's token
        self._with_new_turns: set[Held[Claim]] = set()
        self.loop: LeaseLoop[Claim, GroupResult] = LeaseLoop(
            GroupLeases(buffer, "prompts", name, config.lease_seconds, report),
            self,
            unit="groups",
            capacity=config.max_groups_in_flight,
            lease_seconds=config.lease_seconds,
        )

    async def run(self, stop: threading.Event) -> None:
        """Works until told to stop, then releases unfinished groups with their finished rows.

        Raises UnavailableError if the engine died or Redis is unreachable.
        """
        checking = asyncio.create_task(self._check_engine())
        try:
            await self.loop.run(stop)
        finally:
            checking.cancel()

    def check(self) -> bool:
        """Raises UnavailableError once the engine's process has ended."""
        if self._engine.is_dead:
            raise UnavailableError(f"{self.name}: the engine's process is gone; its last lines are in this log")
        return True

    async def work(self, held: Held[Claim]) -> GroupResult | Release:
        """Samples the rows that earlier holders did not save, and the rest of those that they saved unfinished."""
        with group_span("sample", self._run_id, held.lease.group_id) as attributes:
            outcome = await self._sample(held, attributes)
            if isinstance(outcome, Release):
                attributes["tandem.reason"] = outcome.reason
            return outcome

    async def _sample(self, held: Held[Claim], attributes: Attributes) -> GroupResult | Release:
        try:
            prompt = decode_group(held.lease.payload).prompt
            group = self._groups[held.lease.token] = _Group(prompt, self._saved_rows(held.lease))
            await self._sample_missing(held, group)
            attributes["tandem.version"] = self._engine.policy_version
            attributes["tandem.tokens"] = group.num_tokens
        except DataError as error:
            return Release("unsampleable", "data", str(error))
        except TandemError as error:
            return Release("sampling_failed", "infrastructure", str(error))
        finally:
            self._groups.pop(held.lease.token, None)
            self._with_new_turns.discard(held)
        return GroupResult(group.payload)

    def num_waiting(self) -> int:
        """Groups' worth of episodes that wait for their environment, or have ended before others of their group: other
        groups may use their places in the engine.
        """
        if self._episodes is None:
            return 0
        rows = (row for group in self._groups.values() for row in group.rows.values())
        num_ended = sum(row.finish_reason != "abort" for row in rows)
        return (num_ended + self._episodes.num_waiting) // self._rows_per_group

    async def collect_unsaved(self, held: Sequence[Held[Claim]]) -> None:
        """Adds what is sampled of unfinished rows to the results to save."""
        groups = {one.lease.group_id: self._groups[one.lease.token] for one in held if one.lease.token in self._groups}
        if not groups or not self._partial_rollout:
            return
        try:
            async with asyncio.timeout(_LAST_COLLECT_SECONDS if self.loop.is_stopping else self._collect_seconds):
                unfinished = await (self._episodes or self._engine).unfinished(groups.keys())
        except (TimeoutError, TandemError) as error:
            log.warning("the newest tokens of unfinished answers are not saved: %s", error or "the engine is busy")
            return
        for (group_id, number), row in unfinished.items():
            if not (group := groups[group_id]).is_finished(number):
                group.rows[number] = replace(row, role=group.role(number))
        for one in held:
            newest = groups.get(one.lease.group_id)
            wanted = self.loop.is_stopping or one in self._with_new_turns
            if newest and (wanted or newest.num_tokens > _GROWTH * newest.saved_tokens):
                one.unsaved = newest.to_save
                self._with_new_turns.discard(one)
        if self.loop.is_overloaded and self._episodes and self._episodes.can_move and not self.loop.is_stopping:
            await self._give_to_idle_sampler([one for one in held if one.lease.group_id in groups])

    async def _give_to_idle_sampler(self, held: Sequence[Held[Claim]]) -> None:
        """Gives back the group with the fewest tokens if another sampler waits for prompts, and goes on with it."""
        if not await asyncio.to_thread(self._another_waits):
            return
        if held := [one for one in held if one.lease.token in self._groups]:
            fewest = min(held, key=lambda one: self._groups[one.lease.token].num_tokens)
            log.info("group %s is given back: another sampler has places for its episodes", fewest.lease.group_id)
            self.loop.give_back(fewest, _OVERLOADED)

    def _another_waits(self) -> bool:
        figures = self._buffer.figures()
        others = (figures.get(one.id, {}) for one in self._buffer.samplers() if one.alive and one.id != self.name)
        waited = [one.get("groups_waiting_seconds", 0.0) for one in others if one.get("groups_free")]
        return max(waited, default=0.0) > _IDLE_SECONDS

    def figures(self) -> dict[str, float]:
        """Returns sums since the engine was ready, for heartbeat and Info."""
        episodes = asdict(self._episodes.figures) if self._episodes is not None else {}
        ended = {f"episodes_ended:{stop}": number for stop, number in episodes.pop("ended", {}).items()}
        return {**asdict(self._engine.figures()), **episodes, **ended, **self.loop.figures()}

    def activity(self) -> str:
        if self.loop.num_held:
            return f"sampling {self.loop.held_in_words}" + (", paused" if self.loop.paused else "")
        if self.loop.paused:
            return "paused"
        return f"waiting: {self.loop.refusal}" if self.loop.refusal else "waiting for prompts"

    async def _check_engine(self) -> None:
        try:
            while True:
                await self._engine.check()
                await asyncio.sleep(_CHECK_SECONDS)
        except Exception as error:
            self.loop.fail(error)

    async def _sample_missing(self, held: Held[Claim], group: _Group) -> None:
        prompt = group.prompt

        async def sample(number: int) -> None:
            role = group.role(number)
            sampling = prompt.sampling.greedy if role == "baseline" else prompt.sampling
            unfinished = group.rows.get(number)
            if self._episodes is not None:
                changed, save = partial(self._turns_changed, held), partial(self._save_episode, held, group)
                try:
                    row = await self._episodes.sample(
                        prompt, sampling, number, unfinished=unfinished, on_change=changed, save=save
                    )
                except EpisodeError as error:
                    if not self._keeps_failed_episodes:
                        raise
                    row = self._episodes.failed(prompt, sampling, number, error)
            else:
                row = await self._engine.sample_one(
                    prompt.token_ids, sampling, trajectory_id=number, key=prompt.group_id, unfinished=unfinished
                )
                if row.finish_reason in ("abort", "error"):
                    raise UnavailableError(f"the engine ended trajectory {number} with {row.finish_reason!r}")
            group.rows[number] = row if row.role == role else replace(row, role=role)
            held.unsaved = group.to_save

        numbers = range(prompt.num_samples + self._with_baselines)
        await gather_or_cancel(sample(number) for number in numbers if not group.is_finished(number))

    def _turns_changed(self, held: Held[Claim]) -> None:
        if self._partial_rollout:
            self._with_new_turns.add(held)
            self.loop.save_soon()

    async def _save_episode(self, held: Held[Claim], group: _Group, row: Trajectory) -> None:
        """Saves an unfinished row now. Raises UnavailableError if it is not saved in time, or by another sampler."""
        group.rows[row.trajectory_id] = replace(row, role=group.role(row.trajectory_id))
        held.unsaved = group.to_save
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_INTENT_SECONDS):
                if held.lease.token not in await self.loop.save([held]):
                    return
        name = f"{group.prompt.group_id}/{row.trajectory_id}"
        raise UnavailableError(f"episode {name} is not saved, so it may not call an unsafe tool")

    def _saved_rows(self, claim: Claim) -> dict[int, Trajectory]:
        """Returns the rows that earlier holders saved, by trajectory id; unfinished ones only if they are continued."""
        rows = () if claim.partial is None else decode_group(claim.partial).rows
        saved = {row.trajectory_id: row for row in rows if isinstance(row, Trajectory)}
        return {n: row for n, row in saved.items() if self._partial_rollout or row.finish_reason != "abort"}


def main(recipe: Recipe, redis_url: str, replica: int = 0) -> None:
    """Runs one sampler until SIGTERM, or until the run ends.

    Raises UserError if model, memory or port cannot be used, TandemError if the engine dies or Redis is unreachable.
    """
    configure_logging("rollout", run=recipe.run.run_id, replica=replica)
    try:
        asyncio.run(_serve(recipe, redis_url, replica, stop_event()))
    finally:
        gc.freeze()  # otherwise garbage collection at exit would visit the millions of objects of an engine


def sampler_arguments(recipe: Recipe, group_store: StoreSource | None = None) -> SamplerArguments:
    """How the recipe's samplers start."""
    return SamplerArguments(
        recipe.rollout,
        model_path=recipe.model.path,
        dtype=recipe.trainer.dtype,
        max_model_tokens=recipe.max_model_tokens,
        seed=recipe.run.seed,
        shares_gpu=recipe.weights.backend == "ipc",
        rows_per_group=recipe.rows_per_group,
        group_store=group_store,
    )


async def _serve(recipe: Recipe, redis_url: str, replica: int, stop: threading.Event) -> None:
    started_at = time.time()
    config = recipe.rollout
    arguments = sampler_arguments(recipe, redis_store(redis_url, recipe.run.run_id, "weights"))
    async with AsyncExitStack() as stack:
        # First, because the engine's process is forked and must not inherit gRPC's threads or Redis' sockets.
        with starting():
            engine = await find_engine(config.engine).start(arguments)
        stack.callback(engine.close)
        buffer = run_buffer(recipe, redis_url, stop)
        episodes = await start_episodes(recipe, engine, buffer, stop, stack)
        name = f"rollout-{replica}"
        info = ServiceInfo(
            name,
            lambda: worker.figures(),
            lambda: worker.activity(),
            buffer,
            policy_version=lambda: engine.policy_version,
            incarnation=lambda: engine.incarnation,
            started_at=started_at,
        )
        heartbeat = Heartbeat(info, stop)
        worker = SamplingWorker(
            *(buffer, engine, config, name),
            episodes=episodes,
            with_baselines=recipe.trainer.needs_baselines,
            keeps_failed_episodes=recipe.reward.min_scored_samples > 0,
            report=heartbeat.send,
        )
        security = await asyncio.to_thread(server_security, recipe, buffer)
        servicer = RolloutServicer(
            name, engine, worker.loop, config.max_response_tokens, recipe.weights_folder, episodes
        )
        server = await start_server(
            recipe.run.host,
            config.port + replica if config.port else 0,
            info=info.reply,
            register=lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server),
            service_names=[SERVICE_NAME],
            limits=RPC_LIMITS,
            **security,
        )
        stack.push_async_callback(server.stop, grace_seconds=0.5)
        await asyncio.to_thread(buffer.register_sampler, name, server.address, config.tensor_parallel_size)
        log.info("ready after %.1f s, listens on %s", time.time() - started_at, server.address)
        leaving = asyncio.create_task(_leave_when_told(heartbeat, worker.loop, stop))
        stack.callback(leaving.cancel)
        stack.callback(flush_spans)
        # Not in the heartbeats, which are sent every second: there is a histogram for each tool.
        tools: Sources = {} if episodes is None else {"tools": episodes.tools.tables}
        with heartbeat, metrics_endpoint(info, recipe, tools):
            await worker.run(stop)


async def _leave_when_told(heartbeat: Heartbeat, claims: LeaseLoop[Claim, GroupResult], stop: threading.Event) -> None:
    """Once the controller lets this sampler leave, finishes the groups that it holds, and stops."""
    while not heartbeat.told_to_leave:
        await asyncio.sleep(_LEAVE_POLL_SECONDS)
    claims.paused = True
    await claims.drained(_LEAVE_SECONDS)
    log.info("leaves the run for good")
    stop.set()
