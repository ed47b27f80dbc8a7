"""The Prometheus metrics of Tandem: name, unit, meaning, and the figure of a service that each one shows.

docs/metrics.md lists them; `python -m tandem.services.metrics.docs` writes the list. Names are stable: dashboards and
alert rules use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from tandem.protos.contracts import UnscoredReason
from tandem.reward.scheduling.priority_queue import PRIORITIES
from tandem.rollout.environments.limits import STOPS
from tandem.rollout.environments.tools.outcomes import OTHER, TOOL_ERRORS, Durations
from tandem.services.buffer.starvation import CAUSES
from tandem.services.buffer.types import STATES
from tandem.trainer.batch.rejected import Rejection

Figures = Mapping[str, object]
Source = Literal[
    "service",
    "feed",
    "rollout",
    "tools",
    "environments",
    "reward",
    "trainer",
    "controller",
    "jobs",
    "batch",
    "evaluation",
    "ledger",
]
Kind = Literal["counter", "gauge", "histogram"]

_OUTCOMES = ("completed", "requeued", "dropped", "refused", "lost")
_UNSCORED: tuple[str, ...] = get_args(UnscoredReason)
_DROPPED = (
    *_UNSCORED,
    *("unsampleable", "sampling_failed", "undecodable", "run_ended", "holders_lost"),
    *get_args(Rejection),
)
_SKIPPED = (
    *("malformed", "prompt_type", "unknown_role", "empty", "no_ground_truth", "refused_by_template"),
    *("too_long", "duplicate", "contradiction"),
)
_PHASES = (
    *("publish", "claim", "read", "record", "forward_proximal", "train", "before_step"),
    *("acknowledge", "evaluate", "total"),
)


@dataclass(frozen=True, slots=True)
class Label:
    """A label besides run, service and replica, and the values that it can have."""

    name: str
    values: tuple[str, ...]
    is_open: bool = False
    """Whether there may be other values. Their figures are added up as `other`."""
    of_run: str = ""
    """Which values it has besides, if each run has its own."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `figure` is the name of the figure that it shows. With labels, `*` stands in it for the value of the
    only one, or the figure is a table by their values.
    """

    name: str
    kind: Kind
    source: tuple[Source, ...]
    figure: str
    help: str
    labels: tuple[Label, ...] = ()

    def samples(self, figures: Figures) -> Iterator[tuple[tuple[str, ...], float | Durations]]:
        """Label values and value of every figure that is there and is a number, or in a table."""
        if isinstance(table := figures.get(self.figure), Mapping):
            yield from table.items()
            return
        if not self.labels:
            if (value := _number(figures.get(self.figure))) is not None:
                yield (), value
            return
        start, _, end = self.figure.partition("*")
        label = self.labels[0]
        for known in label.values:
            if (value := _number(figures.get(f"{start}{known}{end}"))) is not None:
                yield (known,), value
        if label.is_open:
            known_figures = {f"{start}{known}{end}" for known in label.values}
            found = [figures[name] for name in figures if name.startswith(start) and name not in known_figures]
            if rest := [value for one in found if (value := _number(one)) is not None]:
                yield (OTHER,), sum(rest)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _one(kind: Kind, source: str, name: str, figure: str, text: str, *labels: Label) -> Metric:
    sources: list[Source] = source.split()  # type: ignore[assignment]
    return Metric(f"tandem_{name}", kind, tuple(sources), figure, text, labels)


def _counter(source: str, name: str, figure: str, text: str, *labels: Label) -> Metric:
    return _one("counter", source, f"{name}_total", figure, text, *labels)


def _gauge(source: str, name: str, figure: str, text: str, *labels: Label) -> Metric:
    return _one("gauge", source, name, figure, text, *labels)


_TOOL = Label("tool", (), is_open=True, of_run="tools of the recipe")


METRICS: tuple[Metric, ...] = (
    # Every service.
    _gauge("service", "start_time_seconds", "started_at", "Unix time at which the process started."),
    _counter("service", "cpu_seconds", "cpu_seconds", "CPU time of the service and of all processes that it started."),
    _gauge("service", "policy_version", "policy_version", "Policy version of the weights that the service holds."),
    # Leases: samplers and the reward service.
    _counter("rollout reward", "groups_ended", "groups_*", "Groups whose lease ended.", Label("outcome", _OUTCOMES)),
    _gauge("rollout reward", "groups_held", "groups_held", "Groups that are being worked on."),
    _counter(
        "rollout reward", "groups_busy_seconds", "groups_busy_seconds", "Time in which at least one group was held."
    ),
    # The feed.
    _counter("feed", "feed_admitted_groups", "groups_admitted", "Groups admitted by this process."),
    _counter("feed", "feed_waiting_seconds", "waiting_seconds", "Time in which the feed waited to admit."),
    _counter(
        "feed",
        "feed_skipped_rows",
        "rows_skipped:*",
        "Rows of the dataset that cannot be used.",
        Label("reason", _SKIPPED, is_open=True),
    ),
    # Samplers.
    _counter("rollout", "sampler_sampled_tokens", "sampled_tokens", "Tokens that were sampled."),
    _counter(
        "rollout",
        "sampler_cached_tokens",
        "cached_tokens",
        "Tokens of prompts that were in the engine's cache, or that another row of the group computed.",
    ),
    _counter(
        "rollout", "sampler_resumed_tokens", "resumed_tokens", "Tokens of unfinished answers that were continued."
    ),
    _counter("rollout", "sampler_resumed_episodes", "resumed_episodes", "Episodes that went on after an interruption."),
    _counter(
        "rollout",
        "sampler_differing_episodes",
        "differing_episodes",
        "Interrupted episodes that began anew because their environment showed something else when it was repeated.",
    ),
    _counter(
        "rollout",
        "sampler_unscored_episodes",
        "unscored_episodes",
        "Episodes without a score: all attempts failed, they had called an unsafe tool and could not go on, nothing "
        "was sampled, or `environment.policies` says so.",
    ),
    _counter(
        *("rollout", "sampler_ended_episodes", "episodes_ended:*"),
        "Episodes by what ended them.",
        Label("stop", STOPS),
    ),
    _counter("rollout", "sampler_prompt_tokens", "prompt_tokens", "Tokens of prompts that were read."),
    _counter("rollout", "sampler_busy_seconds", "busy_seconds", "Time with at least one request in flight."),
    _counter("rollout", "sampler_idle_seconds", "idle_seconds", "Time without a request in flight."),
    _counter("rollout", "sampler_weight_updates", "weight_updates", "Weight updates that were applied."),
    _counter(
        "rollout", "sampler_weight_stall_seconds", "weight_stall_seconds", "Time in which updates held sampling up."
    ),
    # Tools, which samplers call.
    _one(
        *("histogram", "tools", "tool_call_seconds", "call_seconds"),
        "Duration of a call of a tool that was executed, also if it failed.",
        _TOOL,
    ),
    _counter(
        *("tools", "tool_failures", "failures"),
        "Calls that failed, or were not executed.",
        *(_TOOL, Label("outcome", TOOL_ERRORS, is_open=True)),
    ),
    # Environment services.
    _gauge("environments", "environments_open", "open", "Environments whose episodes are being played."),
    _counter("environments", "environments_opened", "opened", "Environments that were opened."),
    _counter("environments", "environments_steps", "steps", "Steps that were made; repeated calls do not count."),
    _counter(
        "environments",
        "environments_orphans",
        "orphans",
        "Environments that were closed because their sampler had gone.",
    ),
    # The reward service.
    _counter("reward", "reward_scored_rows", "rows_scored", "Answers in completed groups that got a score."),
    _counter(
        "reward",
        "reward_unscored_rows",
        "rows_unscored:*",
        "Answers in completed groups that got no score.",
        Label("reason", _UNSCORED, is_open=True),
    ),
    _counter("reward", "reward_replaced_workers", "workers_replaced", "Worker processes that were replaced."),
    _counter(
        "reward",
        "reward_worker_items",
        "worker_items_*",
        "Items that worker processes took.",
        Label("priority", PRIORITIES),
    ),
    _gauge(
        "reward",
        "reward_waiting_calls",
        "calls_waiting_*",
        "Calls that wait for a worker process.",
        Label("priority", PRIORITIES),
    ),
    _counter("reward", "reward_judge_requests", "judge_requests", "Requests to the endpoint of a judge."),
    _counter(
        "reward",
        "reward_chunks_ended",
        "jobs:chunks_*",
        "Chunks whose lease ended.",
        Label("outcome", _OUTCOMES),
    ),
    _gauge("jobs", "jobs", "jobs", "Reward jobs that are stored."),
    _gauge("jobs", "jobs_waiting_chunks", "chunks_waiting", "Chunks of jobs that wait to be scored."),
    _gauge("jobs", "jobs_unscored_bytes", "unscored_bytes", "Items of jobs that wait in Redis."),
    _gauge("jobs", "jobs_result_bytes", "result_bytes", "Results of jobs that Redis keeps."),
    # Rank 0 of the trainer.
    _gauge("trainer", "trainer_waiting_seconds", "waiting_seconds", "Time that the trainer has waited for its batch."),
    _gauge("trainer", "trainer_optimizer_step", "optimizer_step", "Number of the last optimizer step."),
    _counter(
        "trainer", "trainer_failed_updates", "failed_updates", "Weight updates that a sampler failed or did not answer."
    ),
    # The last batch, as metrics.jsonl has it.
    _gauge("batch", "batch_step", "step", "Policy version that the last batch produced."),
    _gauge("batch", "batch_groups", "num_groups", "Groups of the last batch."),
    _gauge("batch", "batch_tokens", "num_tokens", "Tokens of the last batch, prompts included."),
    _gauge(
        "batch",
        "batch_phase_seconds",
        "seconds_*",
        "Duration of a phase of the last batch; `total` is the whole batch. `before_step`, in which optimizer steps "
        "wait for the ledger and for the copy of the version before, is part of `train`.",
        Label("phase", _PHASES),
    ),
    _gauge("batch", "batch_idle_seconds", "trainer_idle_seconds", "Time that the trainer waited for the last batch."),
    _gauge("batch", "batch_reward_mean", "reward_mean", "Mean reward of the last batch."),
    _gauge("batch", "batch_reward_std", "reward_std", "Standard deviation of the last batch's rewards."),
    _gauge("batch", "batch_response_tokens_mean", "response_length_mean", "Mean sampled tokens of an answer."),
    _gauge("batch", "batch_staleness_mean_versions", "staleness_mean", "Mean staleness of the last batch."),
    _gauge("batch", "batch_staleness_max_versions", "staleness_max", "Highest staleness in the last batch."),
    _gauge(
        "batch",
        "batch_rejected_groups",
        "rejected_groups",
        "Groups that selection rejected while the last batch was filled.",
    ),
    _gauge(
        "batch",
        "batch_effective_sample_size_ratio",
        "effective_sample_size",
        "Effective sample size of the importance weights, as a share of the tokens.",
    ),
    _gauge("batch", "batch_behavior_kl_nats", "behavior_proximal_kl", "KL of the behavior from the proximal policy."),
    _gauge("batch", "batch_entropy_nats", "entropy", "Mean entropy of a sampled token."),
    _gauge("batch", "batch_gradient_norm", "grad_norm", "Norm of the gradient before clipping."),
    _gauge(
        "batch", "batch_skipped_steps", "skipped_steps", "Optimizer steps skipped because the gradient was not finite."
    ),
    _gauge("batch", "batch_acknowledged_samplers", "samplers_acknowledged", "Samplers that took the last version."),
    _gauge("batch", "batch_weight_bytes", "weight_bytes", "Weights sent with the last version."),
    _gauge("batch", "batch_weight_sent_bytes", "weight_sent_bytes", "What left the trainer for the last version."),
    _gauge(
        "batch", "batch_weight_encode_seconds", "weight_encode_seconds", "Encoding of the last version's differences."
    ),
    _gauge(
        "batch", "batch_weight_transfer_seconds", "weight_transfer_seconds", "Transfer of the weights, slowest sampler."
    ),
    _gauge("evaluation", "evaluation_version", "version", "Policy version that was evaluated last."),
    _gauge("evaluation", "evaluation_accuracy_ratio", "accuracy", "Share of right answers, first evaluation set."),
    # The controller: the run as a whole.
    _gauge("ledger", "ledger_groups", "*", "Groups in a state of the ledger.", Label("state", STATES)),
    _counter("ledger", "ledger_admitted_groups", "admitted", "Groups that were admitted in the life of the run."),
    _counter(
        "ledger",
        "ledger_dropped_groups",
        "dropped:*",
        "Groups that were dropped in the life of the run.",
        Label("reason", _DROPPED, is_open=True),
    ),
    _gauge(
        "ledger",
        "ledger_mismatch_groups",
        "mismatch",
        "Admitted groups minus the sum over all states: 0, or groups were lost or counted twice.",
    ),
    _gauge("ledger", "ledger_outstanding_groups", "outstanding", "Groups that hold a credit."),
    _gauge("ledger", "ledger_credits", "credits", "Credits of the run, (S + 1)·P."),
    _gauge("ledger", "ledger_set_aside_prompts", "set_aside", "Prompts that failed in every attempt."),
    _gauge("ledger", "ledger_consecutive_drops", "consecutive_drops", "Groups dropped in a row."),
    _gauge("ledger", "ledger_published_version", "published_version", "Policy version that was published last."),
    _gauge("ledger", "ledger_incarnation", "incarnation", "Number of the trainer's start."),
    _counter("ledger", "ledger_expired_leases", "leases_expired", "Leases that expired."),
    _counter(
        "ledger", "ledger_refused_results", "stale_results_refused", "Results of expired leases, which were refused."
    ),
    _gauge(
        "ledger",
        "starved_seconds",
        "starved_*",
        "How long a part of the run has waited, under the cause of its wait; 0 for every other cause.",
        Label("cause", CAUSES),
    ),
    _gauge(
        "ledger",
        "samplers",
        "samplers_*",
        "Samplers with a recent heartbeat, by their state in the registry.",
        Label("state", ("JOINING", "LIVE", "STALE")),
    ),
    _gauge(
        "ledger",
        "silence_seconds",
        "silence_*",
        "Time since the last heartbeat of a service.",
        Label("of", ("feed", "reward", "trainer")),
    ),
)
"""All metrics, in the order of docs/metrics.md."""

BASE_LABELS = ("run", "service", "replica")
"""Labels of every metric."""
