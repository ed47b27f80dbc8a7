"""Unusual files and names: an unreadable value fails its row, an unusable file is a one-line error, nothing is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from tandem.protos.contracts import Scored, ScoreItem, Unscored
from tandem.protos.errors import DataError, JobError, JobExistsError, JobLimitError
from tandem.services.clients import RewardClient
from tandem.services.commands.reward_display import plain, score_line
from tandem.services.data.completions import CompletionFile, Fields
from tandem.services.data.dataset import Dataset, RowFault
from tests.services.commands.conftest import complaints, reward
from tests.support.dataset_files import verl_row, write_lines
from tests.support.scripted_reward import ScriptedReward

pytestmark = pytest.mark.usefixtures("service")


def one_complaint(done: Result) -> str:
    (line,) = complaints(done)
    return line


def written(file: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), file)
    return file


def texts(*values: bytes) -> pa.Array:
    """A column of type text whose bytes need not be valid text, as other programs write it."""
    ends, data = [0], b"".join(values)
    for value in values:
        ends.append(ends[-1] + len(value))
    return pa.Array.from_buffers(
        pa.string(), len(values), [None, pa.array(ends, pa.int32()).buffers()[1], pa.py_buffer(data)]
    )


def times(kind: str, *values: int) -> pa.Array:
    return pa.StructArray.from_arrays([pa.array(values, pa.int64()).view(pa.timestamp(kind))], ["at"])


# ---- values that Python cannot hold ----

UNREADABLE = [
    ("solution", {"solution": texts(b"1", b"\xff", b"2")}, "'utf-8' codec can't decode byte 0xff"),
    ("data_source", {"data_source": texts(b"d", b"\xc3(", b"d")}, "'utf-8' codec can't decode byte 0xc3"),
    ("extra_info", {"extra_info": times("ms", 0, 1 << 55, 0)}, "date value out of range"),
    ("extra_info", {"extra_info": pa.array([[], [("a", 1), ("a", 2)], []], pa.map_(pa.string(), pa.int64()))}, "'a'"),
]


@pytest.mark.parametrize(("name", "columns", "reason"), UNREADABLE, ids=["text", "source", "time", "map"])
def test_an_unreadable_parquet_value_fails_only_its_row(
    service: ScriptedReward, tmp_path: Path, name: str, columns: dict[str, Any], reason: str
) -> None:
    file = written(tmp_path / "f.parquet", **{"solution": ["1", "3", "2"], **columns})
    first, bad, last = CompletionFile(file)
    assert isinstance(first, ScoreItem) and isinstance(last, ScoreItem) and last.solution == "2"
    assert isinstance(bad, Unscored) and bad.detail.startswith(f"row 1: {name} cannot be read: ")
    assert reason in bad.detail and "\n" not in bad.detail


def test_an_invalid_parquet_text_is_named_and_the_rest_is_scored(tmp_path: Path) -> None:
    file = written(tmp_path / "f.parquet", solution=texts(b"1", b"\xff", b"2"))
    done = reward("score", file)
    assert done.stderr.splitlines()[0].startswith(f"tandem: {file} row 1: solution cannot be read: ")
    assert [line.split("  ")[1] for line in done.stdout.splitlines()[:3]] == ["1", "–", "2"]
    job = reward("submit", file, "--watch")
    assert "2 scored (mean 1.5), 1 not scored (invalid_input 1)" in job.stdout


def test_an_unreadable_parquet_value_drops_only_its_row_of_a_training_set(tmp_path: Path) -> None:
    rows = pa.Table.from_pylist([verl_row("?", "1"), verl_row("?", "2")])
    pq.write_table(rows.set_column(0, "data_source", texts(b"\xff", b"d")), tmp_path / "f.parquet")
    first, second = Dataset(tmp_path / "f.parquet")
    assert isinstance(first, RowFault) and first.detail.startswith("data_source cannot be read: ")
    assert not isinstance(second, RowFault) and second.ground_truth == "2"


def test_a_parquet_map_becomes_an_object(tmp_path: Path) -> None:
    """Spark and Java write maps."""
    kind = pa.map_(pa.string(), pa.string())
    truths = pa.array([[("style", "rule"), ("ground_truth", "7")]], kind)
    file = written(
        tmp_path / "f.parquet", solution=["1"], reward_model=truths, extra_info=pa.array([[("a", "b")]], kind)
    )
    assert list(CompletionFile(file)) == [ScoreItem("", "1", "7", {"a": "b"})]


def test_a_data_source_that_is_not_text_fails_its_row(tmp_path: Path) -> None:
    rows = [{"solution": "1", "data_source": source} for source in (["d"], 7, None)]
    first, second, third = CompletionFile(write_lines(tmp_path / "f.jsonl", rows))
    assert isinstance(first, Unscored) and first.detail == "row 0: data_source is of type list, not text"
    assert [one.data_source for one in (second, third) if isinstance(one, ScoreItem)] == ["7", ""]


def test_a_requested_column_that_is_missing_is_an_error(tmp_path: Path) -> None:
    rows = [{"solution": "1", "question": "q1"}]
    parquet = written(tmp_path / "f.parquet", solution=["1"], question=["q1"])
    for file in (write_lines(tmp_path / "f.jsonl", rows), parquet):
        said = one_complaint(reward("score", file, "--group-column", "qestion", code=2))
        assert said == f"dataset {file} has no column 'qestion'; did you mean question?"
        said = one_complaint(reward("submit", file, "--with-prompt", code=2))
        assert said.startswith(f"dataset {file} has no column 'prompt'; it has ")
        (item,) = CompletionFile(file, Fields(group="question"))
        assert isinstance(item, ScoreItem) and item.group == "q1"
        (item,) = CompletionFile(file)
        assert isinstance(item, ScoreItem) and item.group == "", "a file need not have groups"


def test_two_columns_with_the_same_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["1"]), pa.array(["2"])], ["solution", "solution"])
    pq.write_table(table, tmp_path / "f.parquet")
    with pytest.raises(DataError, match="several columns 'solution'; write it with one"):
        CompletionFile(tmp_path / "f.parquet")


@pytest.mark.parametrize("command", ["score", "submit", "results"])
def test_an_unwritable_score_file_is_a_one_line_error_before_any_request(
    service: ScriptedReward, tmp_path: Path, command: str
) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"solution": "1", "ground_truth": "1"}])
    reward("submit", file, "--key", "before")
    (tmp_path / "folder.jsonl").mkdir()
    what = file if command != "results" else next(iter(service.jobs.values())).job_id
    cases = [(tmp_path / "folder.jsonl", "that is a folder"), (tmp_path / f"{'x' * 240}.jsonl", "File name too long")]
    for out, reason in cases:
        said = one_complaint(reward(command, what, "--out", out, code=2))
        assert said.startswith(f"--out {out}: ") and reason in said
    assert not service.requests and len(service.jobs) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.jsonl", "folder.jsonl"]


@pytest.mark.parametrize("command", ["score", "submit"])
def test_the_completions_file_is_not_overwritten(service: ScriptedReward, tmp_path: Path, command: str) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"solution": "1", "ground_truth": "1"}])
    before = file.read_text()
    (tmp_path / "link.jsonl").symlink_to(file)
    for out in (file, tmp_path / "link.jsonl"):
        said = one_complaint(reward(command, file, "--out", out, code=2))
        assert said == f"--out {out}: that is the file of completions itself; name another"
    assert file.read_text() == before and not service.requests and not service.jobs


def test_text_that_is_not_utf_8_is_refused_by_name(tmp_path: Path) -> None:
    """Python decodes arguments and file names that are not UTF-8 to such strings."""
    file, bad = write_lines(tmp_path / "f.jsonl", [{"solution": "1", "ground_truth": "1"}]), "k\udcff"
    for option in ("key", "name"):
        said = one_complaint(reward("submit", file, f"--{option}", bad, code=2))
        assert said == f"{option} 'k\\udcff' cannot be encoded in UTF-8"
    for command in ("results", "cancel", "delete"):
        assert one_complaint(reward(command, bad, code=2)).startswith("job_id 'k\\udcff' cannot be encoded")
    item = ScoreItem("", "1", None)
    with RewardClient() as client:
        for call in (client.score, lambda *given: list(client.score_stream(*given)), client.submit):
            with pytest.raises(DataError, match=r"the rubric 'k\\udcff' cannot be encoded"):
                call([item], bad)
        with pytest.raises(DataError, match="job_id"):
            client.get(bad)
        assert client.score([item]) == [Scored(1.0, {"group": 1.0})]


@pytest.mark.parametrize(
    ("name", "shown"), [(b"\xff.jsonl", "?.jsonl"), (b"\xc3\xa9" * 120, "é" * 100)], ids=["no text", "long"]
)
def test_a_job_is_named_after_its_file(service: ScriptedReward, tmp_path: Path, name: bytes, shown: str) -> None:
    file = tmp_path / os.fsdecode(name)
    file.write_text('{"solution": "1"}\n')
    reward("submit", file)
    (job,) = service.jobs.values()
    assert job.header.name == shown and len(shown.encode()) <= 200


def test_control_characters_in_output_are_replaced(service: ScriptedReward, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [{"solution": "1"}])
    reward("submit", file, "--name", "two\nlines \x1b[31mred")
    _, line = reward("jobs").stdout.splitlines()
    assert line.endswith("two lines \\x1b[31mred")
    assert plain("ü 分 😀") == "ü 分 😀"
    assert score_line(0, Scored(1.0, {"a\x1b[2J": 1.0})) == "0  1  a\\x1b[2J=1"
    assert score_line(0, Unscored("crashed", "a\r\n\x07b")) == "0  –  crashed: a \\x07b"


@pytest.mark.parametrize(("error", "code"), [(JobError, 1), (JobLimitError, 2), (JobExistsError, 2)])
def test_a_job_cancelled_during_submission_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[JobError], code: int
) -> None:
    def refused(*_arguments: object, **_more: object) -> None:
        raise error("job 0 is CANCELLED with 3 chunks and takes no more")

    monkeypatch.setattr(RewardClient, "submit", refused)
    file = write_lines(tmp_path / "f.jsonl", [{"solution": "1"}])
    assert one_complaint(reward("submit", file, code=code)) == "job 0 is CANCELLED with 3 chunks and takes no more"


def test_a_cancelled_job_exits_with_1_and_has_a_row_for_every_item(service: ScriptedReward, tmp_path: Path) -> None:
    rows = [{"solution": str(number), "ground_truth": "1"} for number in range(600)]
    file, out = write_lines(tmp_path / "f.jsonl", rows), tmp_path / "s.jsonl"
    reward("submit", file)
    told = "job job-0 cancelled: 600 items: 512 scored (mean 255.5), 88 not scored (cancelled 88)\n"
    assert reward("cancel", "job-0").stdout == told == reward("results", "job-0", "--out", out, code=1).stdout
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(600))
    assert [line["reason"] for line in lines] == [None] * 512 + ["cancelled"] * 88
    remedy = "to score the file, `tandem reward delete job-0` and submit it again, or give another --key"
    told = f"job job-0 was cancelled; {remedy}"
    assert one_complaint(reward("submit", file, code=1)) == told
    assert one_complaint(reward("submit", file, "--watch", code=1)) == told
    out.unlink()
    assert one_complaint(reward("submit", file, "--out", out, code=1)) == told
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    reward("delete", "job-0")
    reward("submit", file, "--watch")
