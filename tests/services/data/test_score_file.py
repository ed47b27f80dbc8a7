"""The file of scores: rows are in order whatever the order of results, and the file is either complete or absent."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, Unscored
from tandem.protos.errors import DataError
from tandem.services.data import score_file
from tandem.services.data.score_file import ScoreFile

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
