"""Reads files of completions to score, row by row. Columns: `data_source`, `reward_model.ground_truth` (or a plain
column `ground_truth`) and `extra_info` as in a dataset; the completion in `solution`, `response` or `completion`;
optionally `group`, which names the rows that are compared with each other.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import IO, Any

import pyarrow.parquet as pq

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.protos.error_text import nearest
from tandem.protos.errors import DataError
from tandem.services.data.dataset import (
    LOOKED_AT,
    RowFault,
    is_parquet,
    json_columns,
    no_rows,
    parse_line,
    reading,
    table_rows,
)

COMPLETION_COLUMNS = ("solution", "response", "completion")
GROUP_COLUMN = "group"
STANDARD_INPUT = Path("-")
_READ_ROWS = 512
_MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Fields:
    """The columns of a row. Empty `completion`: the first of COMPLETION_COLUMNS that the file has."""

    completion: str = ""
    group: str = GROUP_COLUMN
    prompt_to_extra_info: bool = False
    """Copies the column `prompt` to `extra_info.prompt`, where judges and reward models read it."""


class CompletionFile:
    """An open file: one item per row, in order, or an `Unscored`. Raises DataError for an unusable file or column."""

    def __init__(self, path: str | Path, fields: Fields | None = None) -> None:
        self.file = Path(path)
        self.num_rows: int | None = None
        """None for JSON lines, which are not counted in advance."""
        self.num_without_truth = 0
        """Rows read so far without a ground truth. They are not faults, since some scorers need none."""
        self.first_without_truth = -1
        self._fields = fields or Fields()
        self._standard_input: Iterator[bytes] | None = None
        if self.file == STANDARD_INPUT:
            lines = _lines(sys.stdin.buffer)
            head = list(islice(lines, LOOKED_AT))
            self._standard_input = chain(head, lines)
            self._parquet, columns = False, json_columns(self.name, head)
        else:
            if self.file.exists() and not self.file.is_file():
                fault = f"dataset {self.file} is no file that can be read twice"
                raise DataError(f"{fault}; name one, or - for standard input")
            with reading(self.file):
                self._parquet = is_parquet(self.file)
                columns = self._parquet_columns() if self._parquet else self._line_columns()
        self._columns = columns
        self.completion = self._completion_column()
        if self._fields.group not in ("", GROUP_COLUMN):
            self._check_column(self._fields.group)
        if self._fields.prompt_to_extra_info:
            self._check_column("prompt")

    @property
    def name(self) -> str:
        """The file's name in messages."""
        return "standard input" if self._standard_input is not None else str(self.file)

    def __iter__(self) -> Iterator[ScoreItem | Unscored]:
        rows = self._parquet_rows() if self._parquet else self._json_rows()
        with closing(rows), reading(self.file):
            for index, values in enumerate(rows):
                yield self._item(index, values)

    def digest(self) -> str:
        """SHA-256 of the file's bytes and of the columns read, in hexadecimal."""
        columns = hashlib.sha256(repr((self.completion, self._fields)).encode())
        with reading(self.file), open(self.file, "rb") as data:
            return hashlib.file_digest(data, columns.copy).hexdigest()

    def _parquet_columns(self) -> tuple[str, ...]:
        with pq.ParquetFile(self.file, memory_map=True) as parquet:
            self.num_rows = parquet.metadata.num_rows
            if not self.num_rows:
                raise no_rows(self.name)
            names = tuple(parquet.schema_arrow.names)
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise DataError(f"dataset {self.file} has several columns {twice!r}; write it with one")
            return names

    def _line_columns(self) -> tuple[str, ...]:
        with open(self.file, "rb") as data:
            return json_columns(self.name, list(islice(_lines(data), LOOKED_AT)))

    def _completion_column(self) -> str:
        wanted = self._fields.completion
        if wanted:
            self._check_column(wanted)
            return wanted
        if found := next((name for name in COMPLETION_COLUMNS if name in self._columns), ""):
            return found
        raise DataError(
            f"dataset {self.name} has none of the columns {', '.join(COMPLETION_COLUMNS)} (it has "
            f"{', '.join(self._columns)}); name the one with the completions by --column"
        )

    def _check_column(self, wanted: str) -> None:
        """Requires a column that was named explicitly. Without the group column, for example, scores would differ."""
        if wanted not in self._columns:
            near = nearest(wanted, self._columns)
            meant = f"did you mean {near}?" if near else f"it has {', '.join(self._columns)}"
            raise DataError(f"dataset {self.name} has no column {wanted!r}; {meant}")

    def _parquet_rows(self) -> Generator[Mapping[str, object] | RowFault]:
        needed = {self.completion, self._fields.group, "data_source", "reward_model", "ground_truth", "extra_info"}
        if self._fields.prompt_to_extra_info:
            needed.add("prompt")
        columns = [name for name in self._columns if name in needed]
        with pq.ParquetFile(self.file, memory_map=True) as parquet:
            index = 0
            for batch in parquet.iter_batches(batch_size=_READ_ROWS, columns=columns, use_threads=False):
                yield from table_rows(index, batch)
                index += batch.num_rows

    def _json_rows(self) -> Generator[Mapping[str, object] | RowFault]:
        if self._standard_input is not None:
            yield from map(parse_line, count(), self._standard_input)
        else:
            with open(self.file, "rb") as data:
                yield from map(parse_line, count(), _lines(data))

    def _item(self, index: int, values: Mapping[str, object] | RowFault) -> ScoreItem | Unscored:
        if isinstance(values, RowFault):
            return Unscored("invalid_input", f"row {index}: {values.detail}")
        item = item_of(values, self.completion, self._fields)
        if isinstance(item, Unscored):
            return Unscored(item.reason, f"row {index}: {item.detail}")
        if item.ground_truth in (None, "", [], {}):
            if not self.num_without_truth:
                self.first_without_truth = index
            self.num_without_truth += 1
        return item


def item_of(values: Mapping[str, Any], completion: str, fields: Fields) -> ScoreItem | Unscored:
    """Converts a row's values to an item, or says which field makes the row unusable."""
    solution = values.get(completion)
    if not isinstance(solution, str):
        return _not(completion, solution, "text")
    judged_by, extra_info = values.get("reward_model"), values.get("extra_info")
    for name, value in (("reward_model", judged_by), ("extra_info", extra_info)):
        if value is not None and not isinstance(value, Mapping):
            return _not(name, value, "an object")
    data_source, group = values.get("data_source"), values.get(fields.group)
    if data_source is not None and not isinstance(data_source, str | int):
        return _not("data_source", data_source, "text")
    if group is not None and (not isinstance(group, str | int) or isinstance(group, bool)):
        return _not(fields.group, group, "text or a whole number")
    truth = judged_by.get("ground_truth") if judged_by else None
    if fields.prompt_to_extra_info and values.get("prompt") is not None:
        extra_info = {"prompt": values["prompt"], **(extra_info or {})}
    return ScoreItem(
        data_source="" if data_source is None else str(data_source),
        solution=solution,
        ground_truth=values.get("ground_truth") if truth is None else truth,
        extra_info=extra_info or {},
        group="" if group is None else str(group),
    )


def _not(name: str, value: object, wanted: str) -> Unscored:
    what = "missing" if value is None else f"of type {type(value).__name__}, not {wanted}"
    return Unscored("invalid_input", f"{name} is {what}")


def _lines(data: IO[bytes]) -> Iterator[bytes]:
    """The lines, without trailing blank lines. A line over 64 MiB is truncated and is then not valid JSON."""
    blank = 0
    while line := data.readline(_MAX_LINE_BYTES):
        rest = line
        while len(rest) == _MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = data.readline(_MAX_LINE_BYTES)
        if line.strip():
            yield from [b""] * blank
            yield line
            blank = 0
        else:
            blank += 1
