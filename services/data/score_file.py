"""Writes files of scores atomically, as Parquet or JSON lines in the order of the items."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.protos.contracts import Score, Scored, Unscored, UnscoredReason
from tandem.protos.errors import DataError, UserError
from tandem.trainer.checkpoints.durable import move_file

SUFFIXES = (".parquet", ".jsonl")
PART = "breakdown/"
"""Prefix of the Parquet columns that hold the components of a reward."""
_MAX_PARTS = 1000
_GROUP_ROWS = 1 << 16  # rows of a Parquet row group
_GAP_ROWS = 4096
_CANCELLED = Unscored(cast(UnscoredReason, "cancelled"), "the job was cancelled before this item was scored")
_FIXED = [
    pa.field("index", pa.int64(), nullable=False),
    pa.field("value", pa.float64()),
    pa.field("reason", pa.string()),
    pa.field("detail", pa.string()),
]
_KEPT = pa.schema([*_FIXED, pa.field("breakdown", pa.map_(pa.string(), pa.float64()))])


def check_out(path: Path, completions: Path | None = None) -> None:
    """Raises UserError if scores cannot be written there or would replace the file to score. Called before scoring."""
    if completions is not None and path.exists() and completions.exists() and path.samefile(completions):
        raise UserError(f"--out {path}: that is the file of completions itself; name another")
    with ScoreFile(path):
        pass


class ScoreFile:
    """Context manager that takes results in any order and writes the file last, with the memory of one row group.

    Without `finish`, it leaves no file. Raises UserError if name or folder cannot be used.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in SUFFIXES:
            raise UserError(f"--out {path}: the name should end in {' or '.join(SUFFIXES)}")
        if not path.parent.is_dir():
            raise UserError(f"--out {path}: there is no folder {path.parent}; make it first")
        if path.is_dir():
            raise UserError(f"--out {path}: that is a folder; name a file")
        self._path = path
        self._kept_path = path.with_name(f".{path.name}.{os.getpid()}.results")
        self._partial_path = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._places: list[tuple[int, int]] = []
        """(first item, number of items) of each stored batch."""
        self._parts: set[str] = set()
        """Names of components."""
        self.num_results = 0

    def __enter__(self) -> Self:
        try:
            self._sink = pa.OSFile(str(self._kept_path), "wb")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # the command reports it for every file
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise UserError(f"--out {self._path}: nothing can be written there: {reason}") from None
        self._writer = pa.ipc.new_file(self._sink, _KEPT)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._sink.close()
        self._kept_path.unlink(missing_ok=True)
        self._partial_path.unlink(missing_ok=True)

    def add(self, first_item: int, scores: Sequence[Score]) -> None:
        """Adds results of consecutive items. Raises DataError for over 1,000 components, too many for columns."""
        if not scores:
            return
        for score in scores:
            if isinstance(score, Scored):
                self._parts.update(score.breakdown)
        if len(self._parts) > _MAX_PARTS and self._path.suffix == ".parquet":
            raise DataError(f"--out {self._path}: the breakdowns have more than {_MAX_PARTS} names; write .jsonl")
        self._places.append((first_item, len(scores)))
        self._writer.write_batch(_batch_of(first_item, scores))
        self.num_results += len(scores)

    def finish(self, num_items: int = 0) -> None:
        """Writes and fsyncs the file, then renames it. Of `num_items` items, those without a result are cancelled."""
        for first, last in list(self._gaps(num_items)):
            for begin in range(first, last, _GAP_ROWS):
                self.add(begin, [_CANCELLED] * (min(begin + _GAP_ROWS, last) - begin))
        self._writer.close()
        self._sink.close()
        with pa.memory_map(str(self._kept_path)) as source, pa.ipc.open_file(source) as kept:
            batches = map(kept.get_batch, sorted(range(len(self._places)), key=self._places.__getitem__))
            if self._path.suffix == ".parquet":
                self._write_parquet(batches)
            else:
                self._write_lines(batches)
        move_file(self._partial_path, self._path)

    def _gaps(self, num_items: int) -> Iterator[tuple[int, int]]:
        """(first item, end) of every range without results."""
        known = 0
        for first, count in sorted(self._places):
            if first > known:
                yield known, first
            known = first + count
        if known < num_items:
            yield known, num_items

    def _write_parquet(self, batches: Iterator[pa.RecordBatch]) -> None:
        parts = [pa.field(PART + name, pa.float64()) for name in sorted(self._parts)]
        schema = pa.schema([*_FIXED, *parts])
        with pq.ParquetWriter(self._partial_path, schema) as writer:
            waiting: list[pa.RecordBatch] = []
            num_rows = 0
            for batch in batches:
                waiting.append(self._with_parts(batch, schema))
                num_rows += batch.num_rows
                if num_rows >= _GROUP_ROWS:
                    writer.write_table(pa.Table.from_batches(waiting, schema))
                    waiting, num_rows = [], 0
            if waiting:
                writer.write_table(pa.Table.from_batches(waiting, schema))

    def _with_parts(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        breakdowns = [dict(one or ()) for one in batch.column("breakdown").to_pylist()]
        columns = [batch.column(field.name) for field in _FIXED]
        columns += [pa.array([one.get(name) for one in breakdowns], pa.float64()) for name in sorted(self._parts)]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _write_lines(self, batches: Iterator[pa.RecordBatch]) -> None:
        with open(self._partial_path, "w", encoding="utf-8") as file:
            for batch in batches:
                for row in batch.to_pylist():
                    row["breakdown"] = dict(row["breakdown"] or ())
                    file.write(json.dumps(row) + "\n")


def row_of(index: int, score: Score) -> dict[str, Any]:
    """A result as the object of its JSON line."""
    if isinstance(score, Scored):
        breakdown = dict(sorted(score.breakdown.items()))
        return {"index": index, "value": score.value, "reason": None, "detail": None, "breakdown": breakdown}
    return {"index": index, "value": None, "reason": score.reason, "detail": score.detail, "breakdown": {}}


def _batch_of(first_item: int, scores: Sequence[Score]) -> pa.RecordBatch:
    rows = [row_of(index, score) for index, score in enumerate(scores, start=first_item)]
    for row in rows:
        row["breakdown"] = list(row["breakdown"].items())
    return pa.RecordBatch.from_pylist(rows, schema=_KEPT)
