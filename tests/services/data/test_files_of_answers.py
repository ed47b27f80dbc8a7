"""Files of completions and of scores: both formats agree, bad rows, digests; scores are in order, whole or absent."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import DataError
from tandem.services.data import completions, score_file
from tandem.services.data.completions import CompletionFile, Fields
from tandem.services.data.score_file import ScoreFile
from tests.support.dataset_files import answers, row, write_lines, write_parquet

scores = st.lists(
    st.one_of(
        st.builds(Scored, st.floats(-10, 10), st.dictionaries(st.sampled_from(["a", "b/c", "d"]), st.floats(0, 1))),
        st.builds(Unscored, st.sampled_from(["timeout", "limit"]), st.text(max_size=5)),
    ),
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(scores, st.data())
def test_rows_are_in_order_whatever_the_order_of_results(
    tmp_path_factory: pytest.TempPathFactory, given_scores: list[Score], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("scores")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(given_scores)))) | {0, len(given_scores)})
    pieces = [(first, given_scores[first:last]) for first, last in pairwise(cuts)]
    for suffix in (".parquet", ".jsonl"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(score_file, "_GROUP_ROWS", 5)
            with ScoreFile(folder / f"s{suffix}") as file:
                for first, part in data.draw(st.permutations(pieces)):
                    file.add(first, part)
                file.finish()
    lines = [json.loads(line) for line in (folder / "s.jsonl").read_text().splitlines()]
    assert lines == [score_file.row_of(index, score) for index, score in enumerate(given_scores)]
    table = pq.read_table(folder / "s.parquet")
    assert table.num_rows == len(given_scores)
    for line, wide in zip(lines, table.to_pylist(), strict=True):
        assert {name: wide[name] for name in ("index", "value", "reason", "detail")} == {
            name: line[name] for name in ("index", "value", "reason", "detail")
        }
        assert {
            name.removeprefix("breakdown/"): value for name, value in wide.items() if "/" in name and value is not None
        } == line["breakdown"]


def test_items_without_a_result_are_written_as_cancelled(tmp_path: Path) -> None:
    with ScoreFile(tmp_path / "s.jsonl") as file:
        file.add(2, [Scored(1.0)])
        file.add(5, [Scored(2.0)])
        file.finish(8)
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(8))
    assert [line["reason"] for line in lines] == ["cancelled"] * 2 + [None] + ["cancelled"] * 2 + [None] + [
        "cancelled"
    ] * 2


def test_an_unfinished_file_leaves_the_old_one_in_place(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text("before")
    with pytest.raises(KeyError), ScoreFile(tmp_path / "s.jsonl") as file:
        file.add(0, [Scored(1.0)])
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["s.jsonl"] and (tmp_path / "s.jsonl").read_text() == "before"


def test_a_breakdown_with_too_many_names_needs_json_lines(tmp_path: Path) -> None:
    parts = Scored(1.0, {f"p{number}": 1.0 for number in range(1001)})
    with pytest.raises(DataError, match=r"write \.jsonl"), ScoreFile(tmp_path / "s.parquet") as file:
        file.add(0, [parts])


# ---- completions ----


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
