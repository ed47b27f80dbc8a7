"""Files of completions: Parquet and JSON lines agree, files are streamed, bad lines become bad rows, digests."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.protos.errors import DataError
from tandem.services.data import completions
from tandem.services.data.completions import CompletionFile, Fields
from tests.support.dataset_files import answers, row, write_lines, write_parquet


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.none(), st.text(max_size=5), st.integers()), min_size=1, max_size=30), st.integers(1, 7))
def test_parquet_and_json_lines_hold_the_same_items(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], block: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    rows = [
        {"solution": f"s{number}", "extra_info": {"v": str(value)}, "group": str(value) if value is not None else None}
        for number, value in enumerate(values)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completions, "_READ_ROWS", block)
        from_parquet = list(CompletionFile(write_parquet(folder / "f.parquet", rows)))
    from_lines = list(CompletionFile(write_lines(folder / "f.jsonl", rows)))
    assert from_parquet == from_lines and len(from_lines) == len(rows)
    assert all(isinstance(item, ScoreItem) for item in from_lines)


def test_a_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    rows = [{"solution": "x" * 5000} for _ in range(4000)]  # 20 MB
    different = [{"solution": f"{n}{one['solution']}"} for n, one in enumerate(rows)]
    for file in (write_parquet(tmp_path / "f.parquet", different), write_lines(tmp_path / "f.jsonl", rows)):
        tracemalloc.start()
        count = sum(1 for _ in CompletionFile(file))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert count == 4000 and peak < 8 << 20, (file, peak)


def test_an_overlong_line_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_MAX_LINE_BYTES", 100)
    long = json.dumps(row("x" * 1000))
    (tmp_path / "f.jsonl").write_text("\n".join([json.dumps({"solution": "1"}), long, json.dumps({"solution": "2"})]))
    first, bad, last = CompletionFile(tmp_path / "f.jsonl")
    assert isinstance(first, ScoreItem) and isinstance(last, ScoreItem) and isinstance(bad, Unscored)


def test_blank_lines_count_except_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"solution": "1"}\n\n{"solution": "2"}\n\n  \n')
    assert [isinstance(item, ScoreItem) for item in CompletionFile(tmp_path / "f.jsonl")] == [True, False, True]


def test_a_digest_covers_content_and_columns(tmp_path: Path) -> None:
    file = answers(tmp_path, 1)
    same = answers(tmp_path, 1, name="same.jsonl")
    assert CompletionFile(file).digest() == CompletionFile(same).digest()
    assert CompletionFile(file).digest() != CompletionFile(file, Fields("data_source")).digest()
    assert CompletionFile(file).digest() != CompletionFile(answers(tmp_path, 2, name="other.jsonl")).digest()


def test_a_file_that_breaks_half_way_is_a_one_line_error(tmp_path: Path) -> None:
    file = answers(tmp_path, *range(3000), name="f.parquet")
    opened = CompletionFile(file)
    data = bytearray(file.read_bytes())
    data[100 : len(data) // 2] = bytes(len(data) // 2 - 100)
    file.write_bytes(data)
    with pytest.raises(DataError, match="cannot be read"):
        list(opened)
