"""Dataset files in verl's columns, unusable rows, files of completions, and a model folder that chat templates need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.tiny_model import character_tokenizer


def verl_row(question: str, answer: Any, **more: Any) -> dict[str, Any]:
    row = {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": 0},
    }
    return {**row, **more}


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def write_lines(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def row(solution: Any, /, **more: Any) -> dict[str, Any]:
    """A row of a file of completions, as `tandem reward` reads it."""
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": 3},
        "solution": str(solution),
        **more,
    }


def answers(folder: Path, *solutions: Any, name: str = "answers.jsonl") -> Path:
    rows = [row(solution) for solution in solutions]
    return write_parquet(folder / name, rows) if name.endswith(".parquet") else write_lines(folder / name, rows)


def chat_folder(folder: Path) -> Path:
    """Writes a model folder without weights: a character tokenizer with its chat template, and the model's type."""
    character_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return folder


BAD_ROWS: list[tuple[str, Any]] = [
    ("malformed", "{not json"),
    ("malformed", "[1, 2]"),
    ("malformed", verl_row("a", "1", extra_info="text")),
    ("malformed", verl_row("a", "1", extra_info={"max_response_tokens": 0})),
    ("prompt_type", verl_row("a", "1", prompt=7)),
    ("empty", verl_row("a", "1", prompt=" ")),
    ("prompt_type", verl_row("a", "1", prompt=["text"])),
    ("prompt_type", verl_row("a", "1", prompt=[{"role": "user"}])),
    ("prompt_type", verl_row("a", "1", prompt=[{"role": "user", "content": [{"type": "image"}]}])),
    ("prompt_type", verl_row("a", "1", prompt=[{"content": "a"}])),
    ("unknown_role", verl_row("a", "1", prompt=[{"role": "usr", "content": "a"}])),
    ("empty", verl_row("a", "1", prompt=[])),
    ("empty", verl_row(" \n", "1")),
    ("empty", {"reward_model": {"ground_truth": "1"}}),
    ("no_ground_truth", verl_row("a", None)),
    ("no_ground_truth", verl_row("a", "")),
    ("no_ground_truth", verl_row("a", "1", reward_model=None)),
    ("too_long", verl_row("a" * 300, "1")),
]
