"""What is in the training data and in an evaluation set: prompts with the same messages or, with an environment, tasks
with the same prompt, ground truth and `extra_info`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tandem.services.config import Recipe
from tandem.services.data.dataset import (
    READ_COLUMNS,
    Dataset,
    Row,
    RowFault,
    is_parquet,
    parse_line,
    parse_messages,
    parse_row,
    reading,
    table_rows,
)

Messages = Sequence[Mapping[str, object]]
PLACE_FIELDS = ("index", "split", "example_id")
"""Fields of `extra_info` that say where a row stands, and nothing of its task."""


def compares_tasks(recipe: Recipe) -> bool:
    """Whether rows with the same prompt may be different tasks, as those of an environment. With tools they are not."""
    return bool(recipe.environment.path) and not recipe.environment.tools


def trained_prompts(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Evaluation set → how many of its prompts, or tasks if a recipe `compares_tasks`, are in the training files, and
    of how many. Raises DataError.
    """
    sets = {
        one.name: [row for row in islice(Dataset(one.file), one.limit or None) if isinstance(row, Row)]
        for one in recipe.eval_sets
    }
    files = [file.path for file in recipe.data.train_files]
    if compares_tasks(recipe):
        shared = num_shared_tasks(sets, files)
    else:
        shared = num_shared({name: [row.messages for row in rows] for name, rows in sets.items()}, files)
    return {name: (shared[name], len(rows)) for name, rows in sets.items()}


def num_shared(sets: Mapping[str, Collection[Messages]], files: Iterable[str | Path]) -> dict[str, int]:
    """How many prompts of each set are in the files. Reads only the prompts of these, and most of them in part: those
    that end with the same text as a prompt of a set. Raises DataError if a file cannot be read.
    """
    keys = {name: [_key(messages) for messages in prompts] for name, prompts in sets.items()}
    ends = {messages[-1]["content"] for prompts in sets.values() for messages in prompts}
    return _num_found(keys, ends, files, ["prompt"], _prompt_key)


def num_shared_tasks(sets: Mapping[str, Collection[Row]], files: Iterable[str | Path]) -> dict[str, int]:
    """How many tasks of each set are in the files, as `num_shared`; `PLACE_FIELDS` of `extra_info` do not count."""
    keys = {name: [_task_key(row) for row in rows] for name, rows in sets.items()}
    ends = {row.messages[-1]["content"] for rows in sets.values() for row in rows}
    return _num_found(keys, ends, files, READ_COLUMNS, _row_key)


def _num_found(
    keys: Mapping[str, Sequence[str]],
    ends: AbstractSet[object],
    files: Iterable[str | Path],
    columns: Sequence[str],
    key_of: Callable[[Mapping[str, object]], str | None],
) -> dict[str, int]:
    """How many keys of each set are those of rows of the files, of which only some columns are read."""
    wanted = {key for own in keys.values() for key in own}
    found: set[str | None] = set()
    for file in files:
        found |= {key_of(row) for row in _rows(Path(file), columns, ends) if _end(row.get("prompt")) in ends} & wanted
    return {name: sum(key in found for key in own) for name, own in keys.items()}


def _rows(file: Path, columns: Sequence[str], ends: AbstractSet[object]) -> Iterator[Mapping[str, object]]:
    """Columns of a file as they stand, without rows that cannot be read, and without most of those whose prompt does
    not end with one of these texts.
    """
    with reading(file):
        if is_parquet(file):
            table = pq.ParquetFile(file, memory_map=True)
            there = [name for name in columns if name in table.schema_arrow.names]
            for batch in table.iter_batches(columns=there):
                yield from _read(table_rows(0, _with_texts(batch, ends)))
        else:
            with file.open("rb") as lines:
                yield from _read(parse_line(0, line) for line in lines)


def _read(rows: Iterable[Mapping[str, object] | RowFault]) -> Iterator[Mapping[str, object]]:
    return (row for row in rows if not isinstance(row, RowFault))


def _with_texts(batch: pa.RecordBatch, texts: AbstractSet[object]) -> pa.RecordBatch:
    """The rows with a message that has one of these texts, where messages are stored as usual; else all."""
    prompts = batch.column("prompt")
    item = prompts.type.value_type if pa.types.is_list(prompts.type) else None
    if item is None or not pa.types.is_struct(item) or item.get_field_index("content") < 0:
        return batch
    contents = pc.struct_field(pc.list_flatten(prompts), "content")
    if not pa.types.is_string(contents.type):
        return batch
    try:
        wanted = pa.array(sorted(map(str, texts)), pa.string())
    except UnicodeEncodeError:  # a text of JSON lines may have half of a character, which Parquet never has
        return batch
    found = pc.is_in(contents, value_set=wanted)
    return batch.take(pc.unique(pc.list_parent_indices(prompts).filter(found)))


def _end(prompt: object) -> str | None:
    """The text with which a prompt ends, as far as its last message has one."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    text = last.get("content") if isinstance(last, dict) else last
    return text if isinstance(text, str) else None


def _key(messages: Messages) -> str:
    return json.dumps(list(messages), sort_keys=True, default=str)


def _prompt_key(values: Mapping[str, object]) -> str | None:
    messages = parse_messages(0, values.get("prompt"))
    return None if isinstance(messages, RowFault) else _key(messages)


def _task_key(row: Row) -> str:
    own = {name: value for name, value in row.extra_info.items() if name not in PLACE_FIELDS}
    task = [list(row.messages), row.ground_truth, _without_missing(own)]
    return json.dumps(task, sort_keys=True, default=str)


def _row_key(values: Mapping[str, object]) -> str | None:
    row = parse_row(0, values)
    return None if isinstance(row, RowFault) else _task_key(row)


def _without_missing(value: object) -> object:
    """Without the fields that only other rows of a Parquet file have."""
    if isinstance(value, dict):
        return {name: _without_missing(inner) for name, inner in value.items() if inner is not None}
    return [_without_missing(inner) for inner in value] if isinstance(value, list) else value
