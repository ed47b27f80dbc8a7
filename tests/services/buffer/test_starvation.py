"""What is starved and by whom: a verdict for every cause, from figures as Redis has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.services.buffer.starvation import CAUSES, Observation, Verdict, diagnose
from tandem.services.buffer.types import Sampler
from tandem.services.control.controller import Controller, Lease
from tandem.services.control.launcher import StartedByHand
from tandem.services.control.status import status_of
from tandem.services.metrics.ledger import ledger_figures
from tandem.services.run import watchdog
from tests.support.redis_ring import new_run
from tests.support.run_inputs import recipe_of, small_values

ALIVE = {"feed": 0.5, "rollout-0": 0.5, "reward": 0.5, "trainer": 0.5}
STARVED = {"trainer": {"starved_seconds": 45.0}}


def sampler(state: Any = "LIVE", *, alive: bool = True, version: int = 7) -> Sampler:
    return Sampler("rollout-0", "127.0.0.1:3", state, version, 1, 1, alive, 1)


def seen(counts: Mapping[str, int] | None = None, **changes: Any) -> Observation:
    """A run whose services are alive, with 4 groups a batch and 8 credits, at version 7."""
    found = Observation(
        counts={"published_version": 7, **(counts or {})},
        samplers=[sampler()],
        silences=ALIVE,
        num_credits=8,
        groups_per_batch=4,
    )
    return replace(found, **changes)


def without(service: str, seconds: float = 60.0) -> dict[str, float]:
    return {**ALIVE, service: seconds}


CASES: dict[str, tuple[Observation, float, str]] = {
    "redis_away": (seen(redis_silence=12.0), 12.0, "every service waits for Redis, which has not answered for 12 s"),
    "no_trainer": (seen(silences=without("trainer")), 60.0, "no trainer is alive, the last heartbeat came 60 s ago"),
    "no_reward": (seen({"generated_waiting": 5}, silences=without("reward")), 60.0, "5 groups wait to be scored"),
    "no_environments": (
        seen({"prompts_leased": 3}, silences={**without("environments-0"), "environments-1": 70.0}),
        60.0,
        "no environment service is alive, the last heartbeat came 60 s ago; 3 groups are being sampled",
    ),
    "no_sampler": (
        seen({"prompts_waiting": 6}, silences=without("rollout-0"), samplers=[sampler(alive=False)]),
        60.0,
        "no sampler is alive, the last heartbeat came 60 s ago; 6 groups wait in prompts",
    ),
    "no_feed": (seen(silences=without("feed"), figures=STARVED), 60.0, "no feed is alive"),
    "samplers_paused": (
        seen({"prompts_waiting": 6}, paused=frozenset({"*"}), figures=STARVED),
        45.0,
        "all samplers are paused",
    ),
    "samplers_outdated": (
        seen({"prompts_waiting": 6}, samplers=[sampler("STALE", version=6)], figures=STARVED),
        45.0,
        "6 groups wait in prompts, but no sampler carries version 7: rollout-0 is STALE at version 6",
    ),
    "trainer_hangs": (
        seen(figures={"trainer": {"step_seconds": 95.0, "longest_step_seconds": 4.0}}),
        95.0,
        "the trainer has been in one step for 95 s, before at most 4 s; a rank may hang in a collective",
    ),
    "publishing": (
        seen(figures={"trainer": {"starved_seconds": 20.0, "publishing_seconds": 21.0}}),
        20.0,
        "its last version has been on its way to the samplers for 21 s",
    ),
    "reward_slow": (
        seen({"generated_waiting": 3, "generated_leased": 1, "prompts_leased": 2}, figures=STARVED),
        45.0,
        "trainer starved for 45 s: 0 of 4 groups of the next batch are there; reward scores 1 groups, and 3 more wait",
    ),
    "samplers_slow": (
        seen({"generated_leased": 1, "prompts_leased": 5, "scored_claimed": 2, "prompts_waiting": 1}, figures=STARVED),
        45.0,
        "2 of 4 groups of the next batch are there; samplers hold 5 groups, and 1 more wait for them",
    ),
    "trainer_slow": (seen(trainer_idle=0.1, sampler_idle=0.4), 0.0, "samplers wait for trainer (40%)"),
    "feed_dry": (
        seen(figures=STARVED, activities={"feed": "the last epoch is over (data.max_epochs)"}),
        45.0,
        "no prompt is admitted; the feed: the last epoch is over",
    ),
    "credits_out": (
        seen({"outstanding": 8, "trained": 8}, figures=STARVED),
        45.0,
        "no prompt is admitted, for 8 groups hold all 8 credits",
    ),
}


def test_every_cause_has_a_case() -> None:
    assert set(CASES) == set(CAUSES)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_verdict_names_its_cause_and_since_when(cause: str) -> None:
    found, seconds, says = CASES[cause]
    verdict = diagnose(found)
    assert (verdict.cause, verdict.seconds) == (cause, seconds)
    assert says in verdict.line


def test_status_metrics_and_log_name_every_cause(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = recipe_of(small_values(tmp_path), run={"run_id": "starved"})
    buffer = new_run(redis_url, run_id="starved")
    controller = Controller(recipe, buffer, StartedByHand(buffer), Lease(buffer, "test"))
    for cause, (made_up, seconds, says) in CASES.items():
        found = replace(made_up, counts={**buffer.counts(), **made_up.counts})
        monkeypatch.setattr(controller, "observe", lambda found=found: found)
        (warning,) = status_of(controller, ()).warnings
        assert says in warning
        starved = {name for name, value in ledger_figures(found).items() if name.startswith("starved_") and value}
        assert starved == ({f"starved_{cause}"} if seconds else set())
        monkeypatch.setattr(watchdog, "observe", lambda *_, found=found: found)
        caplog.clear()
        watchdog.Watchdog(buffer, recipe)._check()
        assert [warning] * (seconds >= watchdog.STARVED_SECONDS) == caplog.messages
    buffer.close()


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (Observation(), "none"),
        (seen(), "none"),
        (seen({"prompts_waiting": 6}, figures={"trainer": {"starved_seconds": 9.0}}), "none"),
        (seen({"outstanding": 8}, figures={"rollout-0": {"groups_waiting_seconds": 31.0}}), "credits_out"),
        (seen({"outstanding": 7}, figures={"rollout-0": {"groups_waiting_seconds": 31.0}}), "none"),
        (seen({"outstanding": 8, "prompts_leased": 1}), "none"),
        (seen({"prompts_leased": 6}, silences={"trainer": 0.0}, samplers=[], figures=STARVED), "no_sampler"),
        (seen(silences=without("reward")), "none"),
        (seen(silences=without("feed")), "none"),
        (seen(silences=without("environments-0")), "none"),
        (seen({"prompts_leased": 3}, silences={**without("environments-0"), "environments-1": 1.0}), "none"),
        (seen(silences={**without("rollout-0"), "rollout-1": 1.0}), "none"),
        (seen(figures={"trainer": {"step_seconds": 95.0, "longest_step_seconds": 40.0}}), "none"),
        (seen({"generated_leased": 2}, figures=STARVED), "reward_slow"),
        (seen(trainer_idle=0.5, sampler_idle=0.1), "samplers_slow"),
        (seen(trainer_idle=0.1, sampler_idle=0.1), "none"),
        (seen(trainer_idle=0.5, sampler_idle=0.1, redis_silence=6.0), "redis_away"),
    ],
)
def test_only_what_is_needed_and_absent_for_long_is_named(found: Observation, cause: str) -> None:
    assert diagnose(found).cause == cause


def test_a_run_of_which_nothing_is_known_waits_for_nothing() -> None:
    assert diagnose(Observation()) == Verdict()
