"""The demo's task: three disjoint sets of sums, and training answers that ignore the carry."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from tandem.services.commands.data_check import check_file
from tandem.services.data.arithmetic import EVALUATION_ROWS, right_sum, sloppy_sum, write_task

digits = st.integers(0, 99)


@given(digits, digits)
def test_answers_that_ignore_the_carry_are_right_where_nothing_carries(a: int, b: int) -> None:
    carries = a % 10 + b % 10 >= 10 or a // 10 + b // 10 >= 10
    assert (sloppy_sum(a, b) == right_sum(a, b)) == (not carries)
    assert len(sloppy_sum(a, b)) == len(right_sum(a, b)) == 3


def test_the_sets_are_disjoint_and_determined_by_the_seed(tmp_path: Path) -> None:
    write_task(tmp_path / "a", seed=0)
    write_task(tmp_path / "b", seed=0)
    write_task(tmp_path / "c", seed=1)
    names = ("demonstrations", "train", "eval")
    tables = {name: pq.read_table(tmp_path / "a" / f"{name}.parquet") for name in names}
    questions = {name: {row["prompt"][0]["content"] for row in table.to_pylist()} for name, table in tables.items()}
    splits = {name: {row["extra_info"]["split"] for row in table.to_pylist()} for name, table in tables.items()}
    assert splits == {"demonstrations": {"train"}, "train": {"train"}, "eval": {"test"}}
    assert len(questions["eval"]) == EVALUATION_ROWS
    assert sum(map(len, questions.values())) == len(set().union(*questions.values())) == 10_000
    for name in names:
        assert tables[name].equals(pq.read_table(tmp_path / "b" / f"{name}.parquet"))
        assert not tables[name].equals(pq.read_table(tmp_path / "c" / f"{name}.parquet"))


def test_the_data_passes_the_check(tmp_path: Path) -> None:
    write_task(tmp_path, seed=0)
    report = check_file(tmp_path / "train.parquet")
    assert report.faults == []
    assert report.num_usable == report.num_rows
