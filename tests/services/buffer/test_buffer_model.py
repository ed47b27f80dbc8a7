"""The buffer beside a model of it, while processes die between any two calls and Redis loses its last writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tandem.protos.errors import FencedError, NotAdmittedError
from tandem.services.buffer.orders import SamplerOrder
from tandem.services.buffer.types import STATES, Claim, FailureKind, Sampler, Stage
from tests.support import redis_ring as ring
from tests.support.ledger_model import Limiter
from tests.support.modelled_redis import NUM_REMEMBERED, CrashError, Fault, ModelledRun, set_clock_by_hand
from tests.support.modelled_trainer import STEPS, Disk, Step, TrainerProcess

WORKERS: dict[str, Stage] = {"s0": "prompts", "s1": "prompts", "r0": "generated", "r1": "generated"}
ALL_WORKERS = st.sampled_from(sorted(WORKERS))
NUMBERS = st.integers(0, 10_000)
SEEDS = st.integers(0, 2**32)
FAULTS: tuple[Fault, ...] = ("crash", "loss", "lost answer")
KINDS: tuple[FailureKind, ...] = ("infrastructure", "data", "voluntary")
ORDERS: tuple[SamplerOrder, ...] = ("paused", "standby", "left")


class Worker:
    """A process that samples or scores. Its claims outlive it in `BufferMachine.claims`, as late answers."""

    def __init__(self, run: ModelledRun, name: str, address: str) -> None:
        self.name, self.stage, self.address = name, WORKERS[name], address
        self.buffer = run.open()
        self.weights = (-1, -1)
        """Incarnation and version."""

    def register(self) -> None:
        if self.stage == "prompts":
            self.buffer.register_sampler(self.name, self.address, 1)
        else:
            self.buffer.register_service(self.name, self.address)


class BufferMachine(RuleBasedStateMachine):
    """Feed, two samplers, two scorers and trainers on a buffer, which any of them leaves between any two calls."""

    url: str

    @initialize(
        groups_per_batch=st.integers(1, 3),
        staleness_budget=st.integers(0, 2),
        num_batches=st.integers(3, 8),
        infrastructure=st.integers(0, 2),
        data=st.integers(0, 1),
    )
    def begin(
        self, groups_per_batch: int, staleness_budget: int, num_batches: int, infrastructure: int, data: int
    ) -> None:
        self.limits = (groups_per_batch, staleness_budget, groups_per_batch * num_batches)
        self.budgets = {"infrastructure": infrastructure, "data": data}
        self.num_batches = num_batches
        self._begin()

    def _begin(self) -> None:
        self.run = ModelledRun(self.url, Limiter(*self.limits), self.budgets)
        self.disk = Disk()
        self.trainer: TrainerProcess | None = None
        self.workers: dict[str, Worker] = {}
        self.replaced: list[Worker] = []
        self.processes: dict[str, Worker] = {}
        """By address."""
        self.claims: list[tuple[Claim, int]] = []
        """All that were ever made, with the version of their holder."""
        self.addresses = count(1)
        self.feed = self.run.open()
        self.position = self.outstanding = self.num_checked = 0
        for name in ("trainer", *WORKERS):
            self.start(name)

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.close()

    # ---- faults ----

    @contextmanager
    def _living(self, owner: str) -> Iterator[None]:
        """A process ends if a crash is planned, and the trainer also if it is told that it is not the current one."""
        try:
            yield
        except (CrashError, FencedError) as error:
            if isinstance(error, FencedError):
                assert owner == "trainer" and self.run.num_losses, f"{owner}: {error}"
            if owner == "trainer":
                self.trainer = None
            elif owner == "feed":
                self.position = self.run.model.cursor
            elif (dead := self.workers.pop(owner, None)) is not None:
                del self.processes[dead.address]

    @rule(seconds=st.sampled_from([0.3, 1.0, 4.0, 11.0, -3600.0, 3600.0]))
    def time_passes(self, seconds: float) -> None:
        """Or the clock is set. Some services are too busy to say that they are alive."""
        for name in ("s0", "r0"):
            self._beat(name)
        self.run.pass_time(seconds)

    # ---- the processes ----

    @rule(name=st.sampled_from(["trainer", *WORKERS]))
    def start(self, name: str) -> None:
        if name == "trainer":
            self._start_trainer()
        else:
            self._start_worker(name)

    def _start_trainer(self) -> None:
        self.trainer = None  # its predecessor has ended: the lock of the run folder sees to it
        with self._living("trainer"):
            self.trainer = TrainerProcess(self.run, self.disk, self._deliver, self.num_batches)
            self.outstanding = len(self.run.model.limiter.outstanding)  # what was restored may exceed the budget

    def _deliver(self, sampler: Sampler, weights: tuple[int, int]) -> bool:
        process = self.processes.get(sampler.address)
        if process is None or weights < process.weights:
            return False
        process.weights = weights
        return True

    def _start_worker(self, name: str) -> None:
        """The process before it may hang, and go on later."""
        if name in self.workers:
            self.replaced.append(self.workers.pop(name))
        worker = Worker(self.run, name, f"127.0.0.1:{next(self.addresses)}")
        self.workers[name] = self.processes[worker.address] = worker
        with self._living(name):
            worker.register()

    def _worker(self, name: str) -> Worker | None:
        if name not in self.workers:
            self._start_worker(name)
        return self.workers.get(name)

    def _admit(self, n: int) -> None:
        """As services/feed_service.py does."""
        with self._living("feed"):
            admission = self.feed.admission()
            self.position = admission.cursor
            if admission.wanted <= 0:
                self.feed.mark_exhausted("target")
                return
            ids = [f"0-{self.position + number}" for number in range(n)]
            offered = [(group_id, f"prompt {group_id}".encode()) for group_id in ids]
            self.position += self.feed.admit(offered, self.position + n, after=self.position)

    @rule(name=ALL_WORKERS, n=st.integers(1, 4), lease_seconds=st.sampled_from([0.5, 5.0, 30.0]))
    def claim(self, name: str, n: int, lease_seconds: float) -> None:
        worker = self._worker(name)
        if worker is not None:
            with self._living(name):
                self._claim(worker, n, lease_seconds)

    def _claim(self, worker: Worker, n: int, lease_seconds: float) -> list[Claim]:
        try:
            claims = worker.buffer.claim(worker.stage, worker.name, n, lease_seconds, 0)
        except NotAdmittedError:
            return []
        version = worker.weights[1]
        if worker.stage == "prompts" and claims:
            assert version >= self.run.model.published_version, "it samples with weights before the published ones"
        for claim in claims:
            # What an earlier holder sampled stays.
            kept = int(claim.partial) if claim.partial and worker.stage == "prompts" else version
            self.claims.append((claim, min(version, kept)))
        return claims

    @precondition(lambda self: self.replaced)
    @rule(which=NUMBERS, n=st.integers(1, 4))
    def claim_late(self, which: int, n: int) -> None:
        worker = self.replaced[which % len(self.replaced)]
        try:
            self._claim(worker, n, 5.0)
        except (CrashError, FencedError):
            self.replaced.remove(worker)
            del self.processes[worker.address]

    def _beat(self, name: str) -> None:
        if (worker := self._worker(name)) is not None:
            with self._living(name):
                worker.buffer.heartbeat(name, {})

    @precondition(lambda self: self.claims)
    @rule(
        which=NUMBERS,
        do=st.sampled_from(["complete", "complete", "renew", "save", "fail"]),
        kind=st.sampled_from(KINDS),
    )
    def answer(self, which: int, do: str, kind: FailureKind) -> None:
        """Of the last claims, or of an old one."""
        claim, version = self.claims[-1 - which % min(len(self.claims), 12)]
        with self._living("nobody"):
            self._answer(claim, version, do, kind)

    def _answer(self, claim: Claim, version: int, do: str, kind: FailureKind) -> None:
        buffer, sampled = self.feed, str(version).encode()
        if claim.stage == "generated":
            sampled = claim.payload
        if do == "complete":
            buffer.complete(claim, sampled, ring.HEADERS if claim.stage == "generated" else "")
        elif do == "fail":
            buffer.release(claim, "unscored", kind)
        else:
            buffer.renew([claim], 5.0, {claim.token: sampled} if do == "save" else {})

    @rule(order=st.sampled_from(ORDERS), names=st.sampled_from([set(), set(), {"s0"}, {"s1"}, {"*"}]))
    def order(self, order: SamplerOrder, names: set[str]) -> None:
        self.run.orders.order_samplers("controller", order, names)

    @rule(step=st.sampled_from(STEPS), drop_percent=st.sampled_from([0, 0, 30, 99]), seed=NUMBERS)
    def trainer_step(self, step: Step, drop_percent: int, seed: int) -> None:
        chance = random.Random(seed)
        self._step(step, lambda _: chance.random() * 100 < drop_percent)

    def _step(self, step: Step, reject: Callable[[str], bool] = lambda _: False) -> None:
        if self.trainer is None:
            self._start_trainer()
        elif self.trainer.can(step):
            with self._living("trainer"):
                self.trainer.step(step, reject)

    @rule(seed=SEEDS)
    def work_undisturbed(self, seed: int) -> None:
        """Single rules rarely come in an order that trains a batch."""
        self._turns(random.Random(seed), 0.0)

    @rule(seed=SEEDS)
    def work_with_failures(self, seed: int) -> None:
        self._turns(random.Random(seed), 0.15)

    @rule(seed=SEEDS)
    def work_with_faults(self, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(chance.randint(1, 5)):
            self.run.plan(chance.choice(FAULTS), chance.randrange(80), chance.randint(1, NUM_REMEMBERED))
        self._turns(chance, 0.05)

    def _turns(self, chance: random.Random, trouble: float) -> None:
        for _ in range(chance.randint(1, 3)):
            self._turn(chance, trouble)

    def _turn(self, chance: random.Random, trouble: float) -> None:
        """All stages after one another; of their steps this share fails or is left out."""
        self._step("catch up")
        self._admit(chance.randint(1, 6))
        for name in WORKERS:
            first = len(self.claims)
            self.claim(name, chance.randint(1, 4), chance.choice([5.0, 30.0]))
            for claim, version in self.claims[first:]:
                do = "complete" if chance.random() > trouble else chance.choice(["renew", "save", "fail"])
                with self._living(name):
                    self._answer(claim, version, do, chance.choice(KINDS))
        for step in 2 * STEPS:
            if chance.random() > (0.8 if step == "save" else trouble):  # a rollback has several batches then
                if chance.random() < trouble:
                    self.run.plan("lost answer", 0, 0)
                self._step(step, lambda _: chance.random() < trouble)

    # ---- the laws ----

    @precondition(lambda self: self.num_checked > 15)
    @rule()
    def finish(self) -> None:
        """Without further faults the run ends, and each of its groups is in the weights once."""
        chance = random.Random(0)
        self.run.heal()
        for order in ORDERS:
            self.order(order, set())
        for _ in range(60 + 10 * self.num_batches):
            self.run.pass_time(4.0)  # leases of processes that ended
            for name in WORKERS:
                self._beat(name)
            self._turn(chance, 0.0)
            if self.trainer is not None and self.trainer.is_finished:
                break
        assert self.trainer is not None and self.trainer.is_finished, f"deadlock: {self.run.observer.counts()}"
        self._step("save")
        self._step("commit")
        self.trainer.buffer.drop_outstanding(self.trainer.incarnation, "run_ended")
        counts, total = self.run.observer.counts(), self.run.model.limiter.target_groups
        assert (counts["committed"], counts["outstanding"]) == (total, 0) and len(self.disk.trained) == total
        assert counts["admitted"] == total + counts["dropped"]
        self.run.close()
        self._begin()

    @invariant()
    def redis_and_model_agree(self) -> None:
        self.num_checked += 1
        self.run.check_state()
        counts = self.run.observer.counts()
        assert counts["admitted"] == sum(counts[state] for state in STATES)
        assert self.run.observer.verify() == []

    @invariant()
    def no_group_is_trained_twice_and_staleness_is_bounded(self) -> None:
        for trained in (self.disk.trained, [] if self.trainer is None else self.trainer.weights):
            assert len(trained) == len(set(trained)), "a group entered the weights twice"
        staleness = self.disk.staleness
        assert min(staleness, default=0) >= 0, "weights sampled that no disk can give"
        if staleness and not self.run.num_losses:
            assert sum(staleness) <= self.run.model.limiter.staleness_budget * len(staleness)

    @invariant()
    def no_row_is_skipped(self) -> None:
        """Of those beyond the feed's position, the disk has some whose admission Redis lost."""
        model = self.run.model
        assert model.admitted - model.reentered == {f"0-{index}" for index in range(model.cursor)} - model.reentered
        assert model.reentered <= set(self.disk.trained)

    @invariant()
    def the_budget_holds(self) -> None:
        limiter = self.run.model.limiter
        assert len(limiter.outstanding) <= max(limiter.budget, self.outstanding) or self.run.num_losses
        self.outstanding = len(limiter.outstanding)


IS_LONG = settings.get_current_profile_name() == "long"  # pytest --hypothesis-profile long
CHECKS = settings(
    max_examples=settings().max_examples if IS_LONG else 24,
    stateful_step_count=25,
    deadline=None,
    derandomize=not IS_LONG,
    phases=list(Phase) if IS_LONG else [Phase.generate],  # shrinking takes minutes
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(3600 if IS_LONG else 300)
def test_redis_and_a_model_agree_whatever_dies_and_whatever_redis_loses(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_clock_by_hand(monkeypatch)
    BufferMachine.url = redis_url
    run_machine(BufferMachine, settings=CHECKS)
