"""Which part of a run is starved, by whom, and since when: one verdict from what is known of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from tandem.services.buffer.orders import ALL
from tandem.services.buffer.types import ALIVE_SECONDS, Sampler

REDIS_AWAY_SECONDS = 5.0
"""Redis is asked every second; after this time without an answer it counts as away."""
WAIT_SECONDS = 10.0
"""A shorter wait is part of the work."""
STEP_SECONDS = 60.0
"""A trainer that is silent for longer, and for three times as long as ever before, may hang."""
IDLE_FRACTION = 0.2
"""A side that is idle for a larger fraction of the time counts as waiting."""
_WORDS = {"rollout": "sampler", "reward": "reward service", "environments": "environment service"}

Cause = Literal[
    "none",
    "redis_away",
    "no_trainer",
    "no_reward",
    "no_environments",
    "no_sampler",
    "no_feed",
    "samplers_paused",
    "samplers_outdated",
    "trainer_hangs",
    "publishing",
    "reward_slow",
    "samplers_slow",
    "trainer_slow",
    "feed_dry",
    "credits_out",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)[1:]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a part of the run waits, for how many seconds it has, and both as a line; cause `none`: nothing waits."""

    cause: Cause = "none"
    seconds: float = 0.0
    line: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of a run at one moment, each as `Buffer` returns it; nothing of it by default."""

    counts: Mapping[str, int] = field(default_factory=dict)
    samplers: Sequence[Sampler] = ()
    silences: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    activities: Mapping[str, str] = field(default_factory=dict)
    paused: frozenset[str] = frozenset()
    num_credits: int = 0
    groups_per_batch: int = 0
    redis_silence: float = 0.0
    """Seconds since Redis last answered."""
    trainer_idle: float | None = None
    """Fraction of the last batches' time in which the trainer waited for groups."""
    sampler_idle: float | None = None
    """Fraction in which the samplers had no request."""

    def count(self, *states: str) -> int:
        return sum(self.counts.get(state, 0) for state in states)

    def silence(self, kind: str) -> float:
        """Seconds since the last heartbeat of any service of this kind; infinite if none was ever sent."""
        return min((s for name, s in self.silences.items() if name.partition("-")[0] == kind), default=math.inf)

    def trainer(self, figure: str) -> float:
        return self.figures.get("trainer", {}).get(figure, 0.0)

    @property
    def prompts(self) -> int:
        return self.count("prompts_waiting", "prompts_leased")

    @property
    def unscored(self) -> int:
        return self.count("generated_waiting", "generated_leased")

    @property
    def starved_seconds(self) -> float:
        """How long the trainer has waited for another group of its batch."""
        return self.trainer("starved_seconds")


def diagnose(seen: Observation) -> Verdict:
    """The verdict. What is missing altogether comes before what is slow, and of both what is nearer to the trainer."""
    checks = (_redis, _absent, _paused, _hanging_trainer, _starved_trainer, _starved_samplers, _idle_fractions)
    return next((verdict for check in checks if (verdict := check(seen)) is not None), Verdict())


def _redis(seen: Observation) -> Verdict | None:
    if (silence := seen.redis_silence) < REDIS_AWAY_SECONDS:
        return None
    return Verdict("redis_away", silence, f"every service waits for Redis, which has not answered for {silence:.0f} s")


def _absent(seen: Observation) -> Verdict | None:
    """A service that is needed now and sends no heartbeat."""
    if not seen.silences:
        return None
    no_prompt = not seen.prompts and seen.count("outstanding") < seen.num_credits
    sampled = seen.count("prompts_leased")
    served = any(name.startswith("environments-") for name in seen.silences)
    needed: tuple[tuple[str, Cause, bool, str], ...] = (
        ("trainer", "no_trainer", True, "no version is trained"),
        ("reward", "no_reward", seen.unscored > 0, f"{seen.unscored} groups wait to be scored"),
        ("environments", "no_environments", served and sampled > 0, f"{sampled} groups are being sampled"),
        ("rollout", "no_sampler", seen.prompts > 0, f"{seen.prompts} groups wait in prompts"),
        ("feed", "no_feed", no_prompt and seen.starved_seconds >= WAIT_SECONDS, "no prompt is admitted"),
    )
    for kind, cause, is_needed, waits in needed:
        if is_needed and (silence := seen.silence(kind)) > ALIVE_SECONDS:
            what = _WORDS.get(kind, kind)
            if silence == math.inf:
                return Verdict(cause, seen.starved_seconds, f"no {what} has registered; {waits}")
            return Verdict(cause, silence, f"no {what} is alive, the last heartbeat came {silence:.0f} s ago; {waits}")
    return None


def _paused(seen: Observation) -> Verdict | None:
    alive = [sampler.id for sampler in seen.samplers if sampler.alive]
    if not alive or not (ALL in seen.paused or seen.paused.issuperset(alive)):
        return None
    line = "all samplers are paused: the trainer waits once it has trained what is scored"
    return Verdict("samplers_paused", seen.starved_seconds, line)


def _hanging_trainer(seen: Observation) -> Verdict | None:
    """All ranks meet rank 0 between two steps. If one of them hangs, the others wait for it in a collective."""
    seconds, longest = seen.trainer("step_seconds"), seen.trainer("longest_step_seconds")
    if seconds <= max(STEP_SECONDS, 3 * longest):
        return None
    line = f"the trainer has been in one step for {seconds:.0f} s, before at most {longest:.0f} s; a rank may hang"
    return Verdict("trainer_hangs", seconds, f"{line} in a collective: see logs/trainer.log")


def _starved_trainer(seen: Observation) -> Verdict | None:
    seconds, claimed, wanted = seen.starved_seconds, seen.count("scored_claimed"), seen.groups_per_batch
    if seconds < WAIT_SECONDS:
        return None
    start = f"trainer starved for {seconds:.0f} s: "
    if (publishing := seen.trainer("publishing_seconds")) > 0:
        line = f"its last version has been on its way to the samplers for {publishing:.0f} s"
        return Verdict("publishing", seconds, start + line)
    start += f"{claimed} of {wanted} groups of the next batch are there; "
    if seen.unscored and (seen.unscored >= wanted - claimed or not seen.prompts):
        waiting, leased = seen.count("generated_waiting"), seen.count("generated_leased")
        return Verdict("reward_slow", seconds, f"{start}reward scores {leased} groups, and {waiting} more wait for it")
    if seen.prompts:
        return _starving_samplers(seen, start)
    if (outstanding := seen.count("outstanding")) >= seen.num_credits:
        line = f"no prompt is admitted, for {outstanding} groups hold all {seen.num_credits} credits"
        return Verdict("credits_out", seconds, start + line)
    doing = seen.activities.get("feed", "")
    return Verdict("feed_dry", seconds, f"{start}no prompt is admitted; the feed: {doing or 'says nothing'}")


def _starving_samplers(seen: Observation, start: str) -> Verdict:
    waiting, leased = seen.count("prompts_waiting"), seen.count("prompts_leased")
    version = seen.counts.get("published_version")
    alive = [sampler for sampler in seen.samplers if sampler.alive]
    if any(sampler.state == "LIVE" and sampler.version == version for sampler in alive):
        line = f"samplers hold {leased} groups, and {waiting} more wait for them"
        return Verdict("samplers_slow", seen.starved_seconds, start + line)
    states = ", ".join(f"{sampler.id} is {sampler.state} at version {sampler.version}" for sampler in alive)
    line = f"{waiting} groups wait in prompts, but no sampler carries version {version}: {states}"
    return Verdict("samplers_outdated", seen.starved_seconds, start + line)


def _starved_samplers(seen: Observation) -> Verdict | None:
    """Every sampler waits because all credits are out; the trainer works, or `_starved_trainer` has spoken."""
    waits = [seen.figures.get(one.id, {}).get("groups_waiting_seconds", 0.0) for one in seen.samplers if one.alive]
    if seen.prompts or seen.count("outstanding") < seen.num_credits or min(waits, default=0.0) < WAIT_SECONDS:
        return None
    scored, seconds = seen.count("scored_waiting", "scored_claimed"), min(waits)
    line = f"samplers starved for {seconds:.0f} s: all {seen.num_credits} credits are out; {scored} groups are scored"
    return Verdict("credits_out", seconds, f"{line}, and the trainer: {seen.activities.get('trainer', 'says nothing')}")


def _idle_fractions(seen: Observation) -> Verdict | None:
    """Nothing is starved now. Over the last batches one side may have waited for the other."""
    if seen.trainer_idle is None and seen.sampler_idle is None:
        return None
    trainer, sampler = seen.trainer_idle or 0.0, seen.sampler_idle or 0.0
    if trainer >= max(sampler, IDLE_FRACTION):
        return Verdict("samplers_slow", line=f"trainer waits for samplers ({trainer:.0%})")
    if sampler >= IDLE_FRACTION:
        return Verdict("trainer_slow", line=f"samplers wait for trainer ({sampler:.0%})")
    return Verdict(line="neither side waits long")
