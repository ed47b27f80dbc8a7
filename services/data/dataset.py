"""Reads datasets row by row: Parquet or JSON lines with verl's columns or TRL's (`prompt` may be a text, the ground
truth is in `answer` or `solution`). An unusable row becomes a `RowFault`; an unreadable file raises `DataError`.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from tandem.protos.errors import DataError, ModelError
from tandem.protos.types import Prompt, SamplingParameters
from tandem.services.config import Recipe
from tandem.services.config.recipe import TrainFile
from tandem.services.data.chat import ChatEncoder, RefusedPromptError

COLUMNS = ("data_source", "prompt", "ability", "reward_model", "extra_info")
ROW_LIMIT = "max_response_tokens"
"""Key of `extra_info` that limits a row's answers below `rollout.max_response_tokens`."""
TRUTH_COLUMNS = ("ground_truth", "answer", "solution")
"""Plain columns for the ground truth, tried in this order if `reward_model.ground_truth` is missing."""
READ_COLUMNS = (*COLUMNS, *TRUTH_COLUMNS)
_ROLES = ("system", "developer", "user", "assistant", "tool")
_READ_ROWS = 1024
LOOKED_AT = 100
"""JSON lines from which the columns are determined."""

UnusableReason = Literal["malformed", "prompt_type", "unknown_role", "empty", "no_ground_truth", "refused_by_template"]
FaultReason = UnusableReason | Literal["too_long", "duplicate", "contradiction"]


@dataclass(frozen=True, slots=True)
class Row:
    """A usable row. `index` counts the rows of the file (the lines of JSON lines) from 0."""

    index: int
    data_source: str
    messages: tuple[Mapping[str, Any], ...]
    ability: str
    ground_truth: object
    extra_info: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowFault:
    """An unusable row and the reason."""

    index: int
    reason: FaultReason
    detail: str


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Converts the errors of a missing, damaged or inaccessible file to a DataError."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"dataset {file}: no such file; name a Parquet or JSON lines file") from None
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise DataError(f"dataset {file} cannot be read ({reason}); check or write it again") from None


def is_parquet(file: Path) -> bool:
    """Whether the file's first bytes are those of Parquet. Raises DataError if only its suffix is that of Parquet."""
    with open(file, "rb") as data:
        magic = data.read(4)
    if magic != b"PAR1" and file.suffix == ".parquet":
        raise DataError(f"dataset {file} is not a Parquet file (it starts with {magic!r}); write it again")
    return magic == b"PAR1"


def parse_line(index: int, line: bytes) -> Mapping[str, object] | RowFault:
    """The values of a JSON line, or its fault."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        return RowFault(index, "malformed", f"line {index + 1} is not JSON: {error}")
    return parsed if isinstance(parsed, dict) else RowFault(index, "malformed", f"line {index + 1} is no JSON object")


def no_rows(name: str) -> DataError:
    """The error for a dataset without rows."""
    return DataError(f"dataset {name} holds no rows; write at least one")


def json_columns(name: str, lines: Sequence[bytes]) -> tuple[str, ...]:
    """The columns in the first lines of a dataset. Raises DataError if there is none, or none is a JSON object."""
    if not lines:
        raise no_rows(name)
    if lines[0].lstrip().startswith(b"["):
        raise DataError(f"dataset {name} is one JSON array; write one object a line (JSON lines), or Parquet")
    read = [parse_line(index, line) for index, line in enumerate(lines)]
    rows = [row for row in read if not isinstance(row, RowFault)]
    if not rows and isinstance(read[0], RowFault):
        fault = f"dataset {name} is neither Parquet nor JSON lines ({read[0].detail})"
        raise DataError(f"{fault}; write it in one of these")
    return tuple(dict.fromkeys(column for row in rows for column in row))


def table_rows(index: int, table: pa.RecordBatch | pa.Table) -> list[Mapping[str, object] | RowFault]:
    """The values of Parquet rows from row `index` on. A value that Python cannot hold makes its own row a fault."""
    try:
        rows: list[Mapping[str, object] | RowFault] = table.to_pylist(maps_as_pydicts="strict")
        return rows
    except (ValueError, OverflowError, KeyError):  # UnicodeDecodeError is a ValueError
        return [_table_row(index + place, table.slice(place, 1)) for place in range(table.num_rows)]


def _table_row(index: int, table: pa.RecordBatch | pa.Table) -> Mapping[str, object] | RowFault:
    values = {}
    for name in table.schema.names:
        try:
            (values[name],) = table.column(name).to_pylist(maps_as_pydicts="strict")
        except (ValueError, OverflowError, KeyError) as error:
            return RowFault(index, "malformed", f"{name} cannot be read: {' '.join(str(error).split())}")
    return values


class Dataset:
    """An open dataset file. Rows are parsed on access. Raises DataError if it is damaged or lacks columns or rows."""

    def __init__(self, path: str | Path) -> None:
        self.file = Path(path)
        self._values: Callable[[int], Mapping[str, object] | RowFault]
        with reading(self.file):
            if is_parquet(self.file):
                self.columns, self._length = self._open_parquet()
            else:
                self.columns, self._length = self._open_json_lines()
        if not self._length:
            raise no_rows(str(self.file))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Row | RowFault]:
        return (self.row(index) for index in range(self._length))

    def row(self, index: int) -> Row | RowFault:
        """The row at an index, or its fault."""
        values = self._values(index)
        return values if isinstance(values, RowFault) else parse_row(index, values)

    def _open_parquet(self) -> tuple[tuple[str, ...], int]:
        parquet = pq.ParquetFile(self.file, memory_map=True)
        columns = tuple(parquet.schema_arrow.names)
        truths = ("reward_model", *TRUTH_COLUMNS)
        missing = "prompt" if "prompt" not in columns else "" if set(truths) & set(columns) else " or ".join(truths)
        if missing:
            fault = f"dataset {self.file} has no column {missing} (it has {', '.join(columns)})"
            raise DataError(f"{fault}; write it in verl's columns ({', '.join(COLUMNS)}) or TRL's (prompt, answer)")
        table: pa.Table | None = None
        first, block = 0, list[Mapping[str, object] | RowFault]()

        def values(index: int) -> Mapping[str, object] | RowFault:
            nonlocal table, first, block
            table = self._read_table(parquet) if table is None else table
            end = first + len(block)
            if not first <= index < end:  # reads in blocks if rows are read in order, and single rows otherwise
                first, block = index, table_rows(index, table.slice(index, _READ_ROWS if index in (0, end) else 1))
            return block[index - first]

        self._values = values
        return columns, parquet.metadata.num_rows

    def _read_table(self, parquet: pq.ParquetFile) -> pa.Table:
        try:
            return parquet.read(columns=[name for name in READ_COLUMNS if name in self.columns])
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"dataset {self.file} is damaged ({' '.join(str(error).split())}); write it again"
            ) from None

    def _open_json_lines(self) -> tuple[tuple[str, ...], int]:
        # pyarrow.json requires one type per column (ground truths differ) and rejects the whole file for one bad line.
        content = self.file.read_bytes().rstrip()
        lines = content.split(b"\n") if content else []
        self._values = lambda index: parse_line(index, lines[index])
        return json_columns(str(self.file), lines[:LOOKED_AT]), len(lines)


def parse_row(index: int, values: Mapping[str, object]) -> Row | RowFault:
    """Parses a row of verl's or TRL's columns. Returns the first fault if it is unusable."""
    messages = parse_messages(index, values.get("prompt"))
    if isinstance(messages, RowFault):
        return messages
    judged_by = values.get("reward_model")
    truths = [judged_by.get("ground_truth") if isinstance(judged_by, dict) else None]
    truths += [values.get(name) for name in TRUTH_COLUMNS]
    ground_truth = next((truth for truth in truths if truth is not None and truth not in ("", [], {})), None)
    if ground_truth is None:
        names = ", ".join(TRUTH_COLUMNS)
        return RowFault(index, "no_ground_truth", f"reward_model.ground_truth (or {names}) is missing or empty")
    extra_info = values.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        return RowFault(index, "malformed", f"extra_info is {_kind(extra_info)}, not an object")
    limit = extra_info.get(ROW_LIMIT)
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        return RowFault(index, "malformed", f"extra_info.{ROW_LIMIT} is {limit!r}, not a positive integer")
    try:
        json.dumps([ground_truth, extra_info])
    except (TypeError, ValueError) as error:
        return RowFault(index, "malformed", f"ground_truth or extra_info holds what JSON cannot: {error}")
    data_source, ability = (str(values.get(name) or "") for name in ("data_source", "ability"))
    return Row(index, data_source, messages, ability, ground_truth, extra_info)


def parse_messages(index: int, prompt: object) -> tuple[Mapping[str, object], ...] | RowFault:
    """The chat messages of a row's `prompt`, or the row's fault."""
    if prompt is None or prompt == []:
        return RowFault(index, "empty", "prompt is missing or has no message")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        return RowFault(index, "prompt_type", f"prompt is {_kind(prompt)}, neither a text nor a list of chat messages")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return RowFault(index, "prompt_type", f"message {number} is not an object with a role and content")
        if message["role"] not in _ROLES:
            detail = f"message {number} has role {message['role']!r}; known: {', '.join(_ROLES)}"
            return RowFault(index, "unknown_role", detail)
        content = message.get("content")
        if not isinstance(content, str):
            return RowFault(index, "prompt_type", f"content of message {number} is {_kind(content)}, not text")
    if not any(message["content"].strip() for message in prompt if message["role"] not in ("system", "developer")):
        return RowFault(index, "empty", "no message besides the system's has any text")
    # Parquet gives every message the union of all fields. Templates should not see the missing ones as None.
    return tuple({key: value for key, value in message.items() if value is not None} for message in prompt)


def _kind(value: object) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


class Mixture:
    """A dataset whose epochs hold `weight` times the rows of each file. With a fractional weight, an epoch continues in
    the file where the previous epoch stopped, so all rows are used equally often. Raises DataError as `Dataset` does.
    """

    def __init__(self, files: Sequence[TrainFile]) -> None:
        self._datasets = [Dataset(file.path) for file in files]
        self._sizes = [len(dataset) for dataset in self._datasets]
        self._counts = [max(1, round(file.weight * size)) for file, size in zip(files, self._sizes, strict=True)]
        self._starts = [0, *accumulate(self._counts)]
        self._first_rows = [0, *accumulate(self._sizes)]
        self.name = ", ".join(str(dataset.file) for dataset in self._datasets)

    def __len__(self) -> int:
        """Number of rows in an epoch."""
        return self._starts[-1]

    @property
    def num_rows(self) -> int:
        """Number of rows in all files."""
        return self._first_rows[-1]

    def locate(self, index: int, epoch: int) -> int:
        """The number, over all files, of the row at an index of an epoch."""
        file = bisect_right(self._starts, index) - 1
        place = epoch * self._counts[file] + index - self._starts[file]
        return self._first_rows[file] + place % self._sizes[file]

    def row(self, index: int, epoch: int) -> Row | RowFault:
        """The row at an index of an epoch. A `Row` carries this index, a `RowFault` the row's index in its file."""
        dataset, place = self._place(index, epoch)
        row = dataset.row(place)
        return replace(row, index=index) if isinstance(row, Row) else row

    def row_name(self, index: int, epoch: int) -> str:
        """`row 17 of data/train.jsonl`, counted from 0, for the row at an index of an epoch."""
        dataset, place = self._place(index, epoch)
        return f"row {place} of {dataset.file}"

    def _place(self, index: int, epoch: int) -> tuple[Dataset, int]:
        number = self.locate(index, epoch)
        file = bisect_right(self._first_rows, number) - 1
        return self._datasets[file], number - self._first_rows[file]


class PromptBuilder:
    """Builds a recipe's prompts from rows: applies the chat template, the tokenizer and the length limit."""

    def __init__(self, recipe: Recipe, *, num_samples: int, greedy: bool = False) -> None:
        self._encoder = ChatEncoder(recipe.model.path, recipe.model.chat_template)
        self._max_prompt_tokens = recipe.data.max_prompt_tokens
        self._num_samples = num_samples
        rollout = recipe.rollout
        sampling = SamplingParameters(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            max_tokens=rollout.max_response_tokens,
            stop=rollout.stop,
        )
        self._sampling = sampling.greedy if greedy else sampling

    def build(self, row: Row, epoch: int) -> Prompt | RowFault:
        """The prompt of a row in an epoch, or the row's fault."""
        try:
            token_ids = self._encoder.encode(row.messages)
        except RefusedPromptError as refusal:
            return RowFault(row.index, "refused_by_template", str(refusal))
        if len(token_ids) > self._max_prompt_tokens:
            detail = f"{len(token_ids)} tokens, at most {self._max_prompt_tokens} (data.max_prompt_tokens)"
            return RowFault(row.index, "too_long", detail)
        if not len(token_ids):
            return RowFault(row.index, "empty", "the chat template makes no token of it")
        sampling, limit = self._sampling, row.extra_info.get(ROW_LIMIT)
        if limit:
            sampling = replace(sampling, max_tokens=min(limit, sampling.max_tokens))
        return Prompt(
            epoch=epoch,
            index=row.index,
            token_ids=token_ids,
            num_samples=self._num_samples,
            sampling=sampling,
            data_source=row.data_source,
            ability=row.ability,
            ground_truth=row.ground_truth,
            messages=row.messages,
            extra_info=row.extra_info,
        )

    def nothing_usable(self, file: Path | str, faults: Mapping[int, RowFault]) -> DataError | ModelError:
        """The error for a file without usable prompts: a ModelError if the chat template rejected every row."""
        counted = Counter(fault.reason for fault in faults.values())
        first = next(iter(faults.values()))
        if set(counted) == {"refused_by_template"}:
            return ModelError(
                f"{self._encoder.template_source} refuses every row of {file}: {first.detail}; mend the template"
            )
        reasons = ", ".join(f"{number} {reason}" for reason, number in counted.most_common())
        why = f"{reasons}; row {first.index}: {first.detail}"
        return DataError(f"dataset {file} has no usable row ({why}); see `tandem data check {file}`")


def load_prompts(file: str, recipe: Recipe, limit: int | None = None) -> tuple[list[Prompt], Counter[str]]:
    """Loads at most `limit` prompts of a file, as epoch 0, for one greedy answer each. Returns them and the number of
    skipped rows by reason.

    Raises DataError if the file has no usable row, ModelError if tokenizer or chat template are missing or broken.
    """
    dataset = Dataset(file)
    builder = PromptBuilder(recipe, num_samples=1, greedy=True)
    prompts: list[Prompt] = []
    faults: dict[int, RowFault] = {}
    for row in dataset:
        if len(prompts) == limit:
            break
        prompt = builder.build(row, 0) if isinstance(row, Row) else row
        if isinstance(prompt, RowFault):
            faults[prompt.index] = prompt
        else:
            prompts.append(prompt)
    if not prompts and faults:
        raise builder.nothing_usable(dataset.file, faults)
    return prompts, Counter(fault.reason for fault in faults.values())
