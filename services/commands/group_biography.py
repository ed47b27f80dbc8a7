"""What became of one group, from the ledger and the run folder."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tandem.protos.codec import decode_group
from tandem.protos.errors import DataError, LedgerError, UserError
from tandem.protos.row_headers import group_headers
from tandem.protos.types import RowHeader, TrainBatch
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.history import GroupHistory, GroupNotes, group_history
from tandem.services.buffer.types import Stage
from tandem.services.config import Recipe
from tandem.services.data.dataset import Mixture
from tandem.services.run.inputs import check_training_data
from tandem.services.run.json_files import METRICS_FILE, JsonLines
from tandem.services.trainer.notes import read_notes
from tandem.services.trainer.recovery import CHECKPOINTS_FOLDER
from tandem.trainer.batch.record import BATCHES_FOLDER, read_plan, record_folder, recorded_versions
from tandem.trainer.batch.rejected import REJECTED_FOLDER
from tandem.trainer.checkpoints.state import list_checkpoints

Told = dict[str, list[str]]
_STAGES: Mapping[str, Stage] = {"sampled": "prompts", "scored": "generated"}
_NOT_KEPT = "the record does not say"


def row_namer(recipe: Recipe) -> Callable[[str], str]:
    """Returns what names the row of a group: `row 17 of data/train.jsonl`."""
    try:
        check_training_data(recipe)
        dataset = Mixture(recipe.data.train_files)
    except UserError as error:
        why = str(error)
        return lambda group_id: f"place {group_id.partition('-')[2]} of the epoch ({why})"

    def name(group_id: str) -> str:
        epoch, _, index = group_id.partition("-")
        return dataset.row_name(int(index), int(epoch))

    return name


def biography(buffer: Buffer, recipe: Recipe, group_id: str) -> Told:
    """Lines by topic, in the order of a group's life. Raises DataError if it was never admitted."""
    seen, folder = group_history(buffer.connection, group_id), recipe.folder
    batch = _batch_of(folder, group_id, seen)
    if not seen.admitted and batch is None:
        raise DataError(f"group {group_id} was never admitted to run {recipe.run.run_id}; see `tandem ledger {folder}`")
    epoch = group_id.partition("-")[0]
    told: Told = {
        "group": [f"{group_id}: {_state(seen)}"],
        "prompt": [f"epoch {epoch}, {row_namer(recipe)(group_id)}"],
    }
    headers = [one for one in batch.headers if one.group_id == group_id] if batch else _headers(buffer, group_id, seen)
    recorded = None if batch is None else read_notes(folder, batch.policy_version).get(group_id)
    notes = seen.notes if seen.notes.leases or (seen.state and recorded is None) else recorded
    told |= {"leases": [_NOT_KEPT]} if notes is None else _leases(notes)
    if headers:
        told["versions"] = list(_versions(headers))
    if any(header.reward is not None for header in headers):
        told["reward"] = [_rewards(headers)]
    if batch is not None:
        told |= _training(folder, batch)
    elif seen.ended == "committed":
        told["batch"] = [f"its record is not in {BATCHES_FOLDER}/ (run.keep_batches)"]
    elif seen.ended.startswith("dropped:"):
        told["dropped"] = [_drop(buffer, folder, group_id, seen.ended.removeprefix("dropped:"))]
    return told


def _state(seen: GroupHistory) -> str:
    if seen.ended:
        return seen.ended.replace(":", ": ")
    if seen.version is not None:
        return f"trained in version {seen.version}, not committed"
    return seen.state.replace("_", ", ") if seen.state else "recorded on disk, and unknown to the ledger"


def _batch_of(folder: Path, group_id: str, seen: GroupHistory) -> TrainBatch | None:
    """The recorded batch that holds the group. The last one is the likeliest."""
    if seen.ended.startswith("dropped:"):
        return None
    versions = [seen.version] if seen.version is not None else reversed(recorded_versions(folder))
    batches = (read_plan(folder, version) for version in versions)
    return next((batch for batch in batches if group_id in batch.group_ids), None)


def _headers(buffer: Buffer, group_id: str, seen: GroupHistory) -> Sequence[RowHeader]:
    """The headers of a group in progress; none while it is sampled."""
    if seen.headers or not seen.state.startswith("generated"):
        return seen.headers
    try:
        (payload,) = buffer.read([group_id])
    except LedgerError:
        return ()  # it went on meanwhile
    return group_headers(decode_group(payload))


def _leases(notes: GroupNotes) -> Told:
    """When the group was admitted, who sampled and scored it, and who gave it back."""
    told: Told = {} if notes.admitted_at is None else {"admitted": [_clock(notes.admitted_at)]}
    for topic, stage in _STAGES.items():
        if lease := notes.leases.get(stage):
            told[topic] = [
                f"{'by' if lease.is_over else 'now by'} {lease.worker}, which claimed it {_clock(lease.since)}"
            ]
    lines = [
        f"{_clock(one.time)} by {one.worker} ({one.stage}): {one.reason}{': ' if one.detail else ''}{one.detail}"
        for one in notes.returns
    ]
    if earlier := notes.num_returns - len(notes.returns):
        lines.insert(0, f"{earlier} earlier times, of which nothing is kept")
    return told | ({"returned": lines} if lines else {})


def _versions(headers: Sequence[RowHeader]) -> Iterator[str]:
    """Which versions sampled how many of the answers."""
    rows = groupby(sorted(headers, key=_trajectory), key=_trajectory)
    spans = (tuple(sorted({span.policy_version for one in row for span in one.spans})) for _, row in rows)
    for versions, number in sorted(Counter(spans).items()):
        named = ", ".join(map(str, versions)) or "none"
        yield f"{number} answer{'s' if number > 1 else ''} sampled by version {named}"


def _rewards(headers: Sequence[RowHeader]) -> str:
    first = {_trajectory(header): header.reward for header in headers if header.role == "policy"}
    rewards = [reward for reward in first.values() if reward is not None]
    return f"{', '.join(f'{reward:.4g}' for reward in rewards)} ({len(rewards)} of {len(first)} answers are scored)"


def _training(folder: Path, batch: TrainBatch) -> Told:
    version = batch.policy_version
    steps = {line["step"]: line["optimizer_step"] for line in JsonLines(folder / METRICS_FILE).read()}
    trained = f", trained by optimizer step {steps[version]}" if version in steps else ", not trained yet"
    name = f"{BATCHES_FOLDER}/{record_folder(folder, version).name}"
    within = [path for number, _, path in list_checkpoints(folder / CHECKPOINTS_FOLDER) if number >= version]
    return {
        "batch": [f"version {version} ({name}), recorded by incarnation {batch.incarnation}{trained}"],
        "checkpoint": [
            f"{CHECKPOINTS_FOLDER}/{within[0].name} is the first that contains it" if within else "none yet"
        ],
    }


def _drop(buffer: Buffer, folder: Path, group_id: str, reason: str) -> str:
    if why := buffer.set_aside().get(group_id):
        return f"{why}; set aside, so no later epoch admits its row"
    if suspected := buffer.connection.hash("suspected").get(group_id.encode()):
        return f"{suspected.decode(errors='replace')}; set aside once another group is scored"
    files = sorted((folder / REJECTED_FOLDER).glob(f"*/{group_id}.*"))
    if files:
        return f"{reason}, while batch {int(files[0].parent.name)} was filled; its answers are in {files[0]}"
    return f"{reason}; {_NOT_KEPT} why"


def _trajectory(header: RowHeader) -> int:
    return header.trajectory_id


def _clock(seconds: float) -> str:
    return time.strftime("%F %T", time.localtime(seconds))
