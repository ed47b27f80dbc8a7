"""The rollout service: one engine that claims prompts, samples the n trajectories of each group, and completes it. Many
groups at once.

If the advantage estimator compares with the policy's own greedy answer (`trainer.needs_baselines`), every prompt gets
one trajectory
more: role `baseline`, id n, sampled, saved and resumed like the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.protos.codec import decode_group, encode_group
from tandem.protos.errors import DataError, NotAdmittedError, TandemError, UnavailableError
from tandem.protos.types import Prompt, Role, SamplingParameters, Trajectory, TrajectoryGroup
from tandem.rollout.config import RolloutConfig
from tandem.rollout.vllm.engine import EngineFigures, SamplerEngine
from tandem.services.buffer.buffer import Buffer, Claim, FailureKind
from tandem.services.config import Recipe
from tandem.services.process import starting, stop_event
from tandem.services.rollout.server import start_rollout_server

_CLAIM_SECONDS = 0.5  # longest wait of one claim, and so of a stop
_LOOK_SECONDS = 0.2  # between two looks whether a stop was asked for
_REFUSED_SECONDS = (
    0.1  # until the next claim after one that was refused: an update is under way, or nothing is published yet
)
_HEARTBEAT_SECONDS = 1.0
_CHECK_SECONDS = 10.0  # an engine that hangs would hold its leases for ever


class Sampler(Protocol):
    """What the stage needs of an engine."""

    @property
    def is_dead(self) -> bool: ...

    @property
    def policy_version(self) -> int: ...

    async def check(self) -> None: ...

    async def sample_one(
        self, prompt_ids: NDArray[np.int32], sampling: SamplingParameters, *, trajectory_id: int, key: str = ""
    ) -> Trajectory: ...

    def figures(self) -> EngineFigures: ...


@dataclass(slots=True)
class HeldGroup:
    """A leased group and its finished rows by trajectory id; `num_saved` of them are in the buffer already."""

    claim: Claim
    prompt: Prompt | None = None
    rows: dict[int, Trajectory] = field(default_factory=dict)
    num_saved: int = 0
    task: asyncio.Task[None] | None = None

    def payload(self) -> bytes:
        """The group with the rows it has, in their order."""
        assert self.prompt is not None
        return encode_group(TrajectoryGroup(self.prompt, tuple(self.rows[number] for number in sorted(self.rows))))


class RolloutStage:
    """Claims groups, samples their missing rows, completes them; keeps their leases and saves finished rows
    with them.
    """

    def __init__(
        self, buffer: Buffer, engine: Sampler, config: RolloutConfig, worker: str, *, with_baselines: bool = False
    ) -> None:
        self.paused = False
        self.worker = worker
        self._buffer = buffer
        self._engine = engine
        self._config = config
        self._with_baselines = with_baselines
        self._held: dict[str, HeldGroup] = {}
        self._figures: Counter[str] = Counter()
        self._failure: BaseException | None = None
        self._freed = asyncio.Event()
        self._claiming = False
        self._refusal = ""
        self._started = time.monotonic()

    @property
    def groups_in_flight(self) -> int:
        return len(self._held)

    async def run(self, stop: threading.Event) -> None:
        """Works until told to stop; groups not finished by then go back to the buffer with the rows they have.

        Raises:
            UnavailableError: the engine died, or Redis is gone.
        """
        keepers = [asyncio.create_task(self._every(self._config.lease_seconds / 3, self._renew_leases))]
        keepers.append(asyncio.create_task(self._every(_HEARTBEAT_SECONDS, self._beat)))
        keepers.append(asyncio.create_task(self._every(_CHECK_SECONDS, self._engine.check)))
        try:
            while not stop.is_set() and self._failure is None:
                if self._engine.is_dead:
                    raise UnavailableError(
                        f"{self.worker}: the engine's process is gone; its last lines are in this log"
                    )
                free = self._config.max_groups_in_flight - len(self._held)
                if self.paused or free == 0:
                    await self._wait_for_room()
                    continue
                for claim in await self._claim(free):
                    self._hold(claim)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await self._give_back()
        if self._failure is not None:
            raise self._failure

    async def drained(self, timeout_seconds: float) -> bool:
        """Waits until no group is in flight or about to be; False at the deadline. Pause first."""
        deadline = time.monotonic() + timeout_seconds
        while (self._held or self._claiming) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._held and not self._claiming

    def figures(self) -> dict[str, float]:
        """Sums since the engine was ready, for heartbeat and Info."""
        engine = self._engine.figures()
        return {
            "sampled_tokens": engine.sampled_tokens,
            "prompt_tokens": engine.prompt_tokens,
            "busy_seconds": engine.busy_seconds,
            "idle_seconds": max(0.0, time.monotonic() - self._started - engine.busy_seconds),
            "weight_updates": engine.weight_updates,
            "weight_stall_seconds": engine.weight_stall_seconds,
            "groups_in_flight": len(self._held),
            "groups_completed": 0,
            **self._figures,
        }

    def activity(self) -> str:
        """What the stage does, in a line."""
        if self._held:
            return f"sampling {len(self._held)} groups" + (", paused" if self.paused else "")
        if self.paused:
            return "paused"
        return f"waiting: {self._refusal}" if self._refusal else "waiting for prompts"

    async def _claim(self, free: int) -> list[Claim]:
        self._claiming = True
        try:
            claims = await asyncio.to_thread(
                self._buffer.claim, "prompts", self.worker, free, self._config.lease_seconds, _CLAIM_SECONDS
            )
        except NotAdmittedError as error:
            self._refusal = str(error)
            await asyncio.sleep(_REFUSED_SECONDS)
            return []
        finally:
            self._claiming = False
        self._refusal = ""
        if self.paused:  # since this claim began to wait
            for claim in claims:
                await self._release(claim, "paused", "voluntary")
            return []
        return claims

    def _hold(self, claim: Claim) -> None:
        before = self._held.get(claim.group_id)
        if before is not None and before.task is not None:
            before.task.cancel()  # its lease was lost, and came back to us before we learned of it
        held = self._held[claim.group_id] = HeldGroup(claim)
        held.task = asyncio.create_task(self._process(held))
        held.task.add_done_callback(lambda task: self._let_go(held, task))

    def _let_go(self, held: HeldGroup, task: asyncio.Task[None]) -> None:
        if self._held.get(held.claim.group_id) is held:
            del self._held[held.claim.group_id]
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()  # a bug, or Redis is gone: `run` raises it
        self._freed.set()

    async def _process(self, held: HeldGroup) -> None:
        claim = held.claim
        try:
            self._open(held)
            await self._sample_missing(held)
        except DataError as error:
            print(f"{self.worker}: group {claim.group_id} cannot be sampled: {error}", flush=True)
            await self._release(claim, "unsampleable", "data")
        except TandemError as error:
            print(f"{self.worker}: group {claim.group_id} was not sampled: {error}", flush=True)
            await self._release(claim, "sampling_failed", "infrastructure")
        else:
            accepted = await asyncio.to_thread(lambda: self._buffer.complete(claim, held.payload()))
            self._figures["groups_completed" if accepted else "results_refused"] += 1

    def _open(self, held: HeldGroup) -> None:
        held.prompt = decode_group(held.claim.payload).prompt
        if held.claim.partial is not None:
            rows = decode_group(held.claim.partial).rows
            held.rows = {row.trajectory_id: row for row in rows if isinstance(row, Trajectory)}
            held.num_saved = len(held.rows)

    async def _sample_missing(self, held: HeldGroup) -> None:
        prompt = held.prompt
        assert prompt is not None

        async def sample(number: int, role: Role) -> None:
            sampling = prompt.sampling.greedy if role == "baseline" else prompt.sampling
            row = await self._engine.sample_one(prompt.token_ids, sampling, trajectory_id=number, key=prompt.group_id)
            if row.finish_reason in ("abort", "error"):
                raise UnavailableError(f"the engine ended trajectory {number} with {row.finish_reason!r}")
            held.rows[number] = replace(row, role=role)

        wanted = wanted_rows(prompt.num_samples, with_baseline=self._with_baselines)
        rows = [asyncio.create_task(sample(number, role)) for number, role in wanted if number not in held.rows]
        try:
            await asyncio.gather(*rows)
        finally:
            for row in rows:
                row.cancel()  # one error, or a lost lease, ends them all

    async def _release(self, claim: Claim, reason: str, kind: FailureKind) -> None:
        outcome = await asyncio.to_thread(self._buffer.release, claim, reason, kind)
        self._figures[f"groups_{outcome}"] += 1

    async def _renew_leases(self) -> None:
        held = list(self._held.values())
        grown = [one for one in held if len(one.rows) > one.num_saved]
        partial = {one.claim.group_id: one.payload() for one in grown}
        numbers = [len(one.rows) for one in grown]
        lost = await asyncio.to_thread(
            self._buffer.renew, [one.claim for one in held], self._config.lease_seconds, partial
        )
        for one, number in zip(grown, numbers, strict=True):
            one.num_saved = number
        for one in held:
            if one.claim.group_id in lost and one.task is not None and self._held.get(one.claim.group_id) is one:
                one.task.cancel()  # another sampler has it: what this one finds would be refused
                self._figures["leases_lost"] += 1

    async def _beat(self) -> None:
        with contextlib.suppress(
            UnavailableError
        ):  # a missed beat harms nothing; whether Redis is gone is for the claims to say
            await asyncio.to_thread(self._buffer.heartbeat, self.worker, self.figures())

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        try:
            while True:
                await work()
                await asyncio.sleep(seconds)
        except Exception as error:  # `run` raises it
            self._failure = error
            self._freed.set()

    async def _wait_for_room(self) -> None:
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._freed.wait(), _LOOK_SECONDS)

    async def _give_back(self) -> None:
        """Saves what is finished and ends the leases, so that another sampler goes on at once."""
        held = [one for one in self._held.values() if one.task is not None and not one.task.done()]
        tasks = [one.task for one in held if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not held:
            return
        with contextlib.suppress(UnavailableError):  # without Redis the leases run out by themselves
            partial = {one.claim.group_id: one.payload() for one in held if len(one.rows) > one.num_saved}
            claims = [one.claim for one in held]
            await asyncio.to_thread(self._buffer.renew, claims, self._config.lease_seconds, partial)
            for claim in claims:
                await self._release(claim, "shutdown", "voluntary")


def wanted_rows(num_samples: int, *, with_baseline: bool) -> list[tuple[int, Role]]:
    """(trajectory id, role) of every row of a group: n of the policy, then its greedy answer."""
    policy: list[tuple[int, Role]] = [(number, "policy") for number in range(num_samples)]
    return [*policy, (num_samples, "baseline")] if with_baseline else policy


def main(recipe: Recipe, redis_url: str, replica: int = 0) -> None:
    """Runs one sampler until SIGTERM.

    Raises:
        UserError: the model cannot be used, memory is short, or the port is in use.
        TandemError: the engine died, or Redis is gone.
    """
    try:
        asyncio.run(_serve(recipe, redis_url, replica, stop_event()))
    finally:
        gc.freeze()  # else the interpreter looks through vLLM's millions of objects once more before it ends


async def _serve(recipe: Recipe, redis_url: str, replica: int, stop: threading.Event) -> None:
    started_at = time.time()
    config = recipe.rollout
    # First of all: the engine's process is forked, and must not inherit gRPC's threads or Redis' sockets.
    with starting():
        engine = await SamplerEngine.start(
            config,
            model_path=recipe.model.path,
            dtype=recipe.trainer.dtype,
            max_model_tokens=recipe.max_model_tokens,
            seed=recipe.run.seed,
            shares_gpu=recipe.weights.backend == "ipc",
            rows_per_group=recipe.rows_per_group,
        )
    try:
        buffer = Buffer(redis_url, recipe.run.run_id)
        worker = f"rollout-{replica}"
        stage = RolloutStage(buffer, engine, config, worker, with_baselines=recipe.trainer.needs_baselines)
        port = config.port + replica if config.port else 0
        server = await start_rollout_server(recipe, buffer, engine, stage, port=port, started_at=started_at)
        try:
            await asyncio.to_thread(buffer.register_sampler, stage.worker, server.address, config.tensor_parallel_size)
            print(
                f"{stage.worker}: ready after {time.time() - started_at:.1f} s, listens on {server.address}", flush=True
            )
            await stage.run(stop)
        finally:
            await server.stop(grace_seconds=0.5)
    finally:
        engine.close()
