"""Prompts that are in the training data and in an evaluation set. Prompts with the same messages are the same."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tandem.services.config import Recipe
from tandem.services.data.dataset import (
    Dataset,
    Row,
    RowFault,
    is_parquet,
    parse_line,
    parse_messages,
    reading,
    table_rows,
)

Messages = Sequence[Mapping[str, object]]


def trained_prompts(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Evaluation set → how many of its prompts are in the training files, and of how many. Raises DataError."""
    sets = {
        one.name: [row.messages for row in islice(Dataset(one.file), one.limit or None) if isinstance(row, Row)]
        for one in recipe.eval_sets
    }
    shared = num_shared(sets, [file.path for file in recipe.data.train_files])
    return {name: (shared[name], len(prompts)) for name, prompts in sets.items()}


def num_shared(sets: Mapping[str, Collection[Messages]], files: Iterable[str | Path]) -> dict[str, int]:
    """How many prompts of each set are in the files. Reads only the prompts of these, and most of them in part: those
    that end with the same text as a prompt of a set. Raises DataError if a file cannot be read.
    """
    keys = {name: [_key(messages) for messages in prompts] for name, prompts in sets.items()}
    wanted = {key for own in keys.values() for key in own}
    ends = {messages[-1]["content"] for prompts in sets.values() for messages in prompts}
    found: set[str] = set()
    for file in files:
        for prompt in _prompts(Path(file), ends):
            if _end(prompt) in ends and not isinstance(messages := parse_messages(0, prompt), RowFault):
                found |= {_key(messages)} & wanted
    return {name: sum(key in found for key in own) for name, own in keys.items()}


def _prompts(file: Path, ends: AbstractSet[object]) -> Iterator[object]:
    """The column `prompt` of a file as it stands, without rows that cannot be read, and without most of those that do
    not end with one of these texts.
    """
    with reading(file):
        if is_parquet(file):
            for batch in pq.ParquetFile(file, memory_map=True).iter_batches(columns=["prompt"]):
                rows = table_rows(0, _with_texts(batch, ends))
                yield from (row.get("prompt") for row in rows if not isinstance(row, RowFault))
        else:
            with file.open("rb") as lines:
                parsed = (parse_line(0, line) for line in lines)
                yield from (row.get("prompt") for row in parsed if not isinstance(row, RowFault))


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
