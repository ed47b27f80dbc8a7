"""Nothing is lost: the ledger in itself, and the ledger against what the run folder holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tandem.protos.codec import decode_group
from tandem.protos.errors import DataError, RunFolderError
from tandem.services.buffer.buffer import Buffer
from tandem.services.run.json_files import METRICS_FILE, JsonLines
from tandem.services.trainer.recovery import check_complete
from tandem.trainer.batch.record import read_record, recorded_versions


def check_running(buffer: Buffer, folder: Path, groups_per_batch: int) -> list[str]:
    """One line for each contradiction in the ledger, or between it and the batches on disk, at any moment of a run."""
    counts = buffer.counts()  # before the disk is read, on which a batch is before the ledger has it
    recorded = recorded_versions(folder)
    found = buffer.verify()
    try:
        check_complete(counts, folder, recorded[-1] if recorded else 0, groups_per_batch)
    except RunFolderError as error:
        found.append(str(error))
    return found


def check_finished(buffer: Buffer, folder: Path, groups_per_batch: int) -> list[str]:
    """As `check_running`, and: every group that was admitted is in one recorded batch, or dropped with a reason."""
    found = check_running(buffer, folder, groups_per_batch)
    counts = buffer.counts()
    versions = recorded_versions(folder)
    times: Counter[str] = Counter()
    for version in versions:
        try:
            times.update(_recorded_groups(folder, version))
        except DataError as error:
            found.append(str(error))
    found += [f"group {group_id} is trained {number} times" for group_id, number in times.items() if number > 1]
    if counts["admitted"] != len(times) + counts["dropped"]:
        found.append(f"of {counts['admitted']} groups, {len(times)} are on disk and {counts['dropped']} are dropped")
    if (trained := counts["trained"] + counts["committed"]) != len(times):
        found.append(f"the ledger has {trained} groups as trained, the batches on disk have {len(times)}")
    steps = [line["step"] for line in JsonLines(folder / METRICS_FILE).read()]
    if not steps == versions == list(range(1, len(versions) + 1)):
        found.append(f"the lines of {METRICS_FILE} are of versions {steps}, the batches on disk {versions}")
    return found


def _recorded_groups(folder: Path, version: int) -> list[str]:
    """The group ids of a batch as its payloads have them. Raises DataError if one cannot be read."""
    _, payloads = read_record(folder, version)
    return [decode_group(payload).group_id for payload in payloads.values()]
