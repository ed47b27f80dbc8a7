"""Which keys a resumed run may change: those that its weights do not depend on.

A resumed trainer or `tandem replay` trains all recorded batches with one recipe and must end with the same weights,
whatever the run was resumed with in between. So a key is fixed unless `FREE` names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.protos.errors import ConfigError
from tandem.reward.options.tree import shape_at
from tandem.services.config import Recipe, load_resolved
from tandem.services.run.folder import CONFIG_FILE, EXPORTS_FOLDER, HF_FOLDER

FREE = frozenset(
    {
        # Where the run is, how far it goes, and how far ahead it samples.
        "run.folder",
        "run.total_batches",  # unless the learning rate falls towards it
        "run.staleness_budget",
        "run.hard_staleness_cap",
        "run.max_consecutive_drops",
        "run.redis_url",
        "run.host",
        "run.metrics_to_tensorboard",
        "data.eval_file",
        "data.max_epochs",
        # How answers come about: a batch's record has them, with temperature, lengths and rewards.
        "rollout.engine",
        "rollout.num_replicas",
        "rollout.samples_per_prompt",
        "rollout.temperature",
        "rollout.stop",
        "rollout.tensor_parallel_size",
        "rollout.max_groups_in_flight",
        "rollout.kv_cache_bytes",
        "rollout.gpu_memory_fraction",
        "rollout.lease_seconds",
        "rollout.port",
        "reward",
        "jobs",
        # What the trainer does around learning. Micro-batches stand in the record, too.
        "trainer.rendezvous",
        "trainer.tokens_per_micro_batch",
        "trainer.max_consecutive_rejections",
        "trainer.max_skipped_batches",
        "trainer.checkpoint_every",
        "trainer.keep_checkpoints",
        "trainer.export_every",
        "trainer.evaluate_every",
        "trainer.collective_timeout_seconds",
        "trainer.port",
        # Not weights.bucket_bytes: the digests that a replay compares are made bucket by bucket.
        "weights.backend",
        "weights.deadline_seconds",
        "sft",
    }
)
"""Keys and sections that a resumed run may change. Each needs a changed value in
`tests/services/commands/test_replay.py`, which replays a run with it.
"""


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value changed."""

    key: str
    was: object
    now: object


def check_resumable(recipe: Recipe) -> None:
    """The run in the recipe's folder can go on with this recipe.

    Raises:
        ConfigError: there is no run, or it would have to learn by another recipe than before.
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
        return
    first, *others = changes
    beside = f" (nor {', '.join(change.key for change in others)})" if others else ""
    raise ConfigError(
        f"{first.key} was {_text(first.was)} in the run of {folder} and is {_text(first.now)} "
        f"now: a resumed run cannot change it{beside}; "
        f"set it back (`tandem run {config} --resume` has it as it was), or start a new run{_from_its_weights(folder)}"
    )


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
        if chooser and was[chooser] != given[chooser]:  # another table: its keys are others, too
            yield Change(f"{key}.{chooser}", was[chooser], given[chooser])
        else:
            yield from _changes(was, given, free, key)


def _text(value: object) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _from_its_weights(folder: Path) -> str:
    """How a new run can start from this run's weights; the text follows "a new run"."""
    exports = folder / EXPORTS_FOLDER
    by_version = sorted((export for export in exports.glob("[0-9]*") if export.name.isdigit()), reverse=True)
    newest = next((export for export in (folder / HF_FOLDER, *by_version) if export.is_dir()), None)
    if newest is not None:
        return f" from its weights with model.path={newest}"
    return f" (from its weights: resume it with trainer.export_every=1, then set model.path to what comes in {exports})"
