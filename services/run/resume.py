"""The keys that a resumed run may change: its weights, which a replay must reproduce, do not depend on them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tandem.protos.errors import ConfigError
from tandem.protos.options import Options
from tandem.reward.options.tree import shape_at
from tandem.services.config import Recipe, load_resolved, without_secrets
from tandem.services.run.folder import CONFIG_FILE, EXPORTS_FOLDER, HF_FOLDER, resume_command
from tandem.services.run.inputs import check_inputs, input_paths
from tandem.services.run.model_check import hidden_size
from tandem.services.run.placement import automatic_threads

OptionsT = TypeVar("OptionsT", bound=Options)

_KEYS = {
    # How far sampling runs ahead; the length, unless the learning-rate schedule depends on it.
    "run": "folder total_batches staleness_budget hard_staleness_cap keep_batches max_consecutive_drops redis_url "
    "redis_outage_seconds host control_port certificates server_name insecure metrics_port trackers",
    "data": "eval_file max_epochs",
    # The record of a batch holds the answers, sampling parameters, lengths and rewards.
    "rollout": "engine num_replicas samples_per_prompt temperature top_k top_p min_p stop tensor_parallel_size "
    "num_threads max_groups_in_flight kv_cache_bytes gpu_memory_fraction lease_seconds partial_rollout port",
    "environment": "num_replicas",
    # Micro-batches are in the record, too.
    "trainer": "tokens_per_micro_batch max_consecutive_rejections max_skipped_batches checkpoint_every "
    "keep_checkpoints export_every evaluate_every collective_timeout_seconds port",
    # Not bucket_bytes: a replay compares digests that are computed per bucket.
    "weights": "backend deadline_seconds",
}
FREE = frozenset(
    {"reward", "jobs", "autoscale", "sft", "eval"}
    | {f"{table}.{key}" for table in _KEYS for key in _KEYS[table].split()}
)
"""Keys and sections that a resumed run may change. `test_replay.py` replays a run with a changed value for each."""


class Change(NamedTuple):
    """A key whose value changed."""

    key: str
    was: object
    now: object


def with_automatic_values(recipe: Recipe, *, resume: bool) -> Recipe:
    """The recipe with the ZeRO stage and the numbers of threads that "auto" stands for. With `resume` they are those of
    the run in the recipe's folder. If there is none, a service was started by itself: the machines may differ, so that
    "auto" stays for the threads. Raises ConfigError if that run's configuration cannot be read.
    """
    trainer, rollout = recipe.trainer, recipe.rollout
    if "auto" not in (trainer.zero_stage, trainer.num_threads, rollout.num_threads):
        return recipe
    config = recipe.folder / CONFIG_FILE
    known = load_resolved(config) if resume and config.is_file() else recipe
    stage = known.trainer.resolved_zero_stage
    for_rank, for_worker = known.trainer.num_threads, known.rollout.num_threads
    if not resume:
        for_rank = automatic_threads(trainer.num_ranks, hidden_size(recipe.model.path))
        for_worker = automatic_threads(rollout.num_replicas * rollout.tensor_parallel_size)
    chosen = {
        "trainer": _filled(trainer, zero_stage=stage, num_threads=for_rank),
        "rollout": _filled(rollout, num_threads=for_worker),
    }
    return recipe.model_copy(update=chosen)


def _filled(table: OptionsT, **values: object) -> OptionsT:
    """The table with these values in place of "auto"."""
    chosen = {key: value for key, value in values.items() if getattr(table, key) == "auto"}
    return table.model_copy(update=chosen)


def check_resumable(recipe: Recipe) -> None:
    """Checks that the recipe's folder holds a run that can be resumed with this recipe and the files that it names;
    raises ConfigError if not.
    """
    folder = recipe.folder
    config = folder / CONFIG_FILE
    if not config.is_file():
        raise ConfigError(
            f"run folder {folder} holds no run to resume ({CONFIG_FILE} is missing); start it without --resume"
        )
    before, now = (one.model_dump(mode="json") for one in (load_resolved(config), recipe))
    changes = list(forbidden_changes(before, now))
    if not changes:
        check_inputs(recipe, FREE)
        return
    key, was, given = changes[0]
    raise ConfigError(
        f"{key} was {_text(was)} in the run of {folder} and is {_text(given)} now: a resumed run cannot change it"
        f"{_others(changes)}; set it back (`{resume_command(folder)}` has it as it was), or start a new run"
        f"{from_its_weights(folder)}"
    )


def check_joins(recipe: Recipe, created_with: Recipe, place: str) -> None:
    """Checks the recipe of a service that joins a run in Redis at `place` from a folder that holds no run against the
    recipe that the run was created with, which has no secrets. Files are compared by their contents (`join_inputs`),
    and what "auto" stands for depends on the machine. Raises ConfigError.
    """
    before, now = (one.model_dump(mode="json") for one in (created_with, without_secrets(recipe)))
    for one in (before, now):
        one["data"]["train"] = [{**file, "path": ""} for file in one["data"]["train"]]
    files = input_paths(recipe).keys()
    changes = [
        one for one in forbidden_changes(before, now) if one.key not in files and "auto" not in (one.was, one.now)
    ]
    if changes:
        key, was, given = changes[0]
        raise ConfigError(
            f"{key} was {_text(was)} in run {recipe.run.run_id} at {place} and is {_text(given)} here: a service that "
            f"joins a run cannot change it{_others(changes)}; give the run's recipe, or choose another run.run_id"
        )


def _others(changes: Sequence[Change]) -> str:
    return f" (nor {', '.join(change.key for change in changes[1:])})" if changes[1:] else ""


def forbidden_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """The changes that a resumed run may not make, in the order of the recipe. Both arguments are resolved recipes."""
    falling = before["trainer"]["schedule"] != "constant"
    return _changes(before, now, FREE - {"run.total_batches"} if falling else FREE)


def _changes(
    before: Mapping[str, object], now: Mapping[str, object], free: frozenset[str], path: str = ""
) -> Iterator[Change]:
    for name in {**before, **now}:
        key = f"{path}.{name}" if path else name
        was, given = before.get(name), now.get(name)
        if key in free or was == given:
            continue
        if not isinstance(was, dict) or not isinstance(given, dict):
            yield Change(key, was, given)
            continue
        shape = shape_at(Recipe, key.split("."))
        chooser = shape.naming_key if shape is not None else ""
        if chooser and was[chooser] != given[chooser]:  # another table has other keys
            yield Change(f"{key}.{chooser}", was[chooser], given[chooser])
        else:
            yield from _changes(was, given, free, key)


def _text(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def from_its_weights(folder: Path) -> str:
    """How to start a new run from this run's weights; the text follows "a new run"."""
    exports = folder / EXPORTS_FOLDER
    by_version = sorted((export for export in exports.glob("[0-9]*") if export.name.isdigit()), reverse=True)
    newest = next((export for export in (folder / HF_FOLDER, *by_version) if export.is_dir()), None)
    if newest is not None:
        return f" from its weights with model.path={newest}"
    return f" (from its weights: resume it with trainer.export_every=1, then set model.path to what comes in {exports})"
