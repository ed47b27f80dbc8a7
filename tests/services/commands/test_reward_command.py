"""`tandem reward`: files of every kind against a scripted service, a line for each bad row, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.protos.errors import UserError
from tandem.services.commands import reward_tasks
from tests.services.commands.conftest import complaints, reward
from tests.support.dataset_files import answers, row, write_lines
from tests.support.scripted_reward import ScriptedReward

ROWS = [0.5, 1, "timeout", 2]


pytestmark = pytest.mark.usefixtures("service")


@pytest.mark.parametrize("name", ["answers.jsonl", "answers.parquet", "answers.json"])
def test_a_small_file_is_scored_at_once(tmp_path: Path, name: str) -> None:
    done = reward("score", answers(tmp_path, *ROWS, name=name))
    assert done.stdout.splitlines() == [
        "0  0.5  group=4",
        "1  1  group=4",
        "2  –  timeout: scripted",
        "3  2  group=4",
        "4 items: 3 scored (mean 1.16667), 1 not scored (timeout 1); scorer: number (the service's default)",
    ]
    assert done.stderr == ""


def test_a_request_holds_the_fields_of_its_row_and_the_rubric(service: ScriptedReward, tmp_path: Path) -> None:
    rows = [row(1, group=7), row(2, answer="3", reward_model=None, ground_truth=[1, "x"])]
    file = write_lines(tmp_path / "f.jsonl", rows)
    reward("score", file, "--scorer", "number", "--argument", "scale=2.5", "--argument", "mode=last line")
    (request,) = service.requests
    rubric = '[[components]]\nscorer = "number"\n[components.arguments]\nscale = 2.5\nmode = "last line"\n'
    assert request.rubric == rubric
    first, second = request.items
    assert (first.data_source, first.solution, first.ground_truth) == ("test", "1", '"1"')
    assert (first.extra_info, first.group) == ('{"index": 3}', "7")
    assert (second.ground_truth, second.group) == ('[1, "x"]', "")
    reward("score", file, "--column", "answer", "--with-prompt", "--group-column", "data_source")
    assert [item.solution for item in service.requests[-1].items] == ["3"]  # the first row has no solution
    assert json.loads(service.requests[-1].items[-1].extra_info)["prompt"] == [{"role": "user", "content": "?"}]
    assert service.requests[-1].items[-1].group == "test" and service.requests[-1].rubric == ""
    reward("score", file, "--scorer", "number")
    assert service.requests[-1].rubric == '[[components]]\nscorer = "number"\n'


def test_standard_input_is_read_to_its_last_line() -> None:
    """There are more lines than are read to detect the columns; none is lost in between."""
    given_lines = "".join(json.dumps(row(number)) + "\n" for number in range(250)) + "\n\n"
    lines = reward("score", "-", given=given_lines).stdout.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [[str(n), str(n)] for n in range(250)]


def test_a_single_completion_needs_no_file(service: ScriptedReward) -> None:
    given = {"--solution": "0.25", "--ground-truth": "42", "--data-source": "d", "--extra-info": '{"a": 1}'}
    done = reward("score", *(word for pair in given.items() for word in pair))
    assert done.stdout.splitlines() == [
        "0  0.25  group=1",
        "1 item: 1 scored (mean 0.25); scorer: number (the service's default)",
    ]
    item = service.requests[-1].items[0]
    assert (item.ground_truth, item.data_source, item.extra_info) == ('"42"', "d", '{"a": 1}')


def test_scores_are_written_as_json_lines_and_as_files(tmp_path: Path) -> None:
    file = answers(tmp_path, *ROWS)
    told = [json.loads(line) for line in reward("score", file, "--json").stdout.splitlines()]
    assert told[0] == {"index": 0, "value": 0.5, "reason": None, "detail": None, "breakdown": {"group": 4.0}}
    assert told[2] == {"index": 2, "value": None, "reason": "timeout", "detail": "scripted", "breakdown": {}}
    done = reward("score", file, "--out", tmp_path / "s.jsonl")
    assert [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()] == told
    assert done.stdout.splitlines() == [
        "4 items: 3 scored (mean 1.16667), 1 not scored (timeout 1); scorer: number (the service's default)"
    ]
    reward("score", file, "--out", tmp_path / "s.parquet")
    table = pq.read_table(tmp_path / "s.parquet")
    assert table.column_names == ["index", "value", "reason", "detail", "breakdown/group"]
    assert table.column("value").to_pylist() == [0.5, 1.0, None, 2.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.jsonl", "s.jsonl", "s.parquet"]


BAD_LINES: list[tuple[str | bytes | dict[str, Any], str]] = [
    ("{not json", "line {} is not JSON"),
    ("[1]", "line {} is no JSON object"),
    (b'{"solution": "\xff"}', "line {} is not JSON"),
    ("", "line {} is not JSON"),
    ("[" * 100_000, "line {} is not JSON"),
    (row(1, solution=3), "solution is of type int, not text"),
    (row(1, solution=None), "solution is missing"),
    (row(1, solution=["a"]), "solution is of type list, not text"),
    (row(1, reward_model="1"), "reward_model is of type str, not an object"),
    (row(1, extra_info=[1]), "extra_info is of type list, not an object"),
    (row(1, group=1.5), "group is of type float, not text or a whole number"),
]


def test_bad_rows_are_named_and_the_rest_is_scored(tmp_path: Path) -> None:
    lines = [row(1), *(bad for bad, _ in BAD_LINES), row(2)]
    texts = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    file = tmp_path / "f.jsonl"
    file.write_bytes(b"\n".join(text.encode() if isinstance(text, str) else text for text in texts))
    faults = [f"row {n}: {said.format(n + 1)}" for n, (_, said) in enumerate(BAD_LINES, start=1)]
    done = reward("score", file)
    told, (first, *middle, last, _) = complaints(done), done.stdout.splitlines()
    for number, fault in enumerate(faults, start=1):
        assert told[number - 1].startswith(f"{file} {fault}")
        assert middle[number - 1].startswith(f"{number}  –  invalid_input: {fault}")
    assert first == "0  1  group=2" and last == "12  2  group=2" and len(told) == len(middle) == len(faults)
    assert reward("score", file, "--strict", code=1).stdout == done.stdout
    job = reward("submit", file, "--watch")
    assert complaints(job) == told and "not scored (invalid_input 11)" in job.stdout
    reward("submit", file, "--strict", "--key", "other", code=1)
    out = tmp_path / "s.jsonl"
    reward("submit", file, "--out", out, "--strict", code=1)
    quoted = [json.loads(line) for line in out.read_text().splitlines()][1:-1]
    for fault, one in zip(faults, quoted, strict=True):
        assert one["reason"] == "invalid_input" and fault[:30] in one["detail"]


def test_many_bad_rows_are_reported_in_few_lines(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [row(1), *[row(1, solution=3)] * 50])
    lines = complaints(reward("score", file))
    assert len(lines) == 21 and lines[-1] == f"{file}: and 30 rows more that cannot be scored"


def test_a_row_without_ground_truth_is_reported_and_sent(service: ScriptedReward, tmp_path: Path) -> None:
    without: list[Any] = [{"ground_truth": None}, None, {"ground_truth": ""}]
    rows = [row(1), *(row(number, reward_model=one) for number, one in enumerate(without, 2))]
    file = write_lines(tmp_path / "f.jsonl", rows)
    done = reward("score", file)
    told = "3 rows without reward_model.ground_truth, the first is row 1; a scorer that needs it gives no score there"
    assert complaints(done) == [f"{file}: {told}"]
    assert "4 scored" in done.stdout and service.requests[-1].items[1].ground_truth == ""


def test_bad_input_is_a_one_line_error_with_exit_code_2(tmp_path: Path) -> None:
    file = answers(tmp_path, 1)
    empty = write_lines(tmp_path / "empty.jsonl", [])
    array = write_lines(tmp_path / "array.jsonl", [[row(1)]])
    text = write_lines(tmp_path / "text.jsonl", ["hello"])
    fake = write_lines(tmp_path / "fake.parquet", ["hello"])
    bare = write_lines(tmp_path / "bare.jsonl", [{"solutions": "1"}])
    damaged = answers(tmp_path, 1, name="damaged.parquet")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    cases: list[tuple[list[object], str]] = [
        (["score"], "name a FILE to score"),
        (["score", tmp_path / "gone"], "no such file"),
        (["score", tmp_path], "is no file that can be read twice"),
        (["score", empty], "holds no rows"),
        (["score", array], "is one JSON array"),
        (["score", text], "neither Parquet nor JSON lines"),
        (["score", fake], "is not a Parquet file"),
        (["score", damaged], "cannot be read"),
        (["score", bare], "none of the columns solution, response, completion (it has solutions)"),
        (["score", bare, "--column", "solution"], "no column 'solution'; did you mean solutions?"),
        (["score", file, "--rubric", tmp_path / "gone"], "gone: no such file; see examples/rubrics"),
        (["score", file, "--rubric", damaged], "is not text"),
        (["score", file, "--rubric", file, "--scorer", "x"], "exclude one another"),
        (["score", file, "--argument", "a=1"], "needs --scorer"),
        (["score", file, "--scorer", "x", "--argument", "a"], "write NAME=VALUE"),
        (["score", file, "--out", tmp_path / "s.csv"], "should end in .parquet or .jsonl"),
        (["score", file, "--out", tmp_path / "no" / "s.jsonl"], "there is no folder"),
        (["score", file, "--solution", "x"], "leave out"),
        (["score", "--solution", "x", "--extra-info", "["], "--extra-info is not JSON"),
        (["score", "--solution", "x", "--extra-info", "[1]"], "not a JSON object"),
        (["score", file, "--address", "nowhere"], "is not host:port"),
        (["submit", tmp_path / "gone"], "no such file"),
        (["submit", "-"], "a job needs a file"),
        (["results", "gone"], "job gone: there is none"),
        (["cancel", "gone"], "job gone: there is none"),
        (["scorers", "nmber"], "did you mean number?"),
    ]
    for arguments, said in cases:
        done = reward(*arguments, code=2)
        (line,) = complaints(done)
        assert said in line and done.stdout == "", line
    with pytest.raises(UserError, match=r"'b\.toml' is a second configuration"):
        reward_tasks.serve_alone(["a.toml", "b.toml"], host="", port=None, redis_url="", folder=tmp_path, name="")


def test_a_rubric_that_the_service_refuses_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("wrong")
    for command in ("score", "submit"):
        done = reward(command, answers(tmp_path, 1), "--rubric", tmp_path / "r.toml", code=2)
        assert complaints(done) == ["components: there are none"]


def test_an_unreachable_service_exits_with_1(tmp_path: Path) -> None:
    (line,) = complaints(reward("jobs", "--address", "127.0.0.1:1", code=1))
    assert line.startswith("UnavailableError: the reward service at 127.0.0.1:1 cannot be reached")


def test_a_file_too_large_for_score_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_tasks, "MOST_ROWS_AT_ONCE", 3)
    (line,) = complaints(reward("score", answers(tmp_path, 1, 2, 3, 4), code=2))
    assert "has more than 3 rows; `tandem reward submit`" in line


def test_a_file_is_scored_as_a_job_into_a_file(service: ScriptedReward, tmp_path: Path) -> None:
    file = answers(tmp_path, *range(1000), name="answers.parquet")
    done = reward("submit", file)
    assert done.stdout.splitlines() == [
        "job job-0: 1,000 items",
        "its results: tandem reward results job-0 --out scores.parquet",
    ]
    header = next(iter(service.jobs.values())).header
    assert header.name == "answers.parquet" and header.idempotency_key.startswith("file-")
    out = tmp_path / "scores.parquet"
    assert reward("results", "job-0", "--out", out).stdout == "job job-0 done: 1,000 items: 1,000 scored (mean 499.5)\n"
    table = pq.read_table(out)
    assert table.column("index").to_pylist() == list(range(1000))
    assert table.column("value").to_pylist() == list(map(float, range(1000)))
    head, listed = reward("jobs").stdout.splitlines()
    assert head.split()[:3] == ["job", "state", "items"] and listed.split()[:4] == ["job-0", "done", "1000", "1000"]
    assert json.loads(reward("jobs", "--json").stdout)["num_scored"] == 1000


def test_the_same_file_and_rubric_are_the_same_job(service: ScriptedReward, tmp_path: Path) -> None:
    file = answers(tmp_path, 1, 2)
    rubric = tmp_path / "r.toml"
    rubric.write_text("# a rubric")
    submit = ["submit", file, "--rubric", rubric, "--watch"]
    first = reward(*submit).stdout.splitlines()
    assert first == ["job job-0: 2 items", "job job-0 done: 2 items: 2 scored (mean 1.5)"]
    assert reward(*submit).stdout.splitlines() == ["job job-0 (submitted before): 2 items", first[1]]
    for change in (["--column", "data_source"], ["--priority", "5"], ["--with-prompt"], ["--key", "mine"]):
        reward(*submit, *change)
    rubric.write_text("# another")
    reward(*submit)
    answers(tmp_path, 1, 3)
    reward(*submit)
    assert len(service.jobs) == 7


def test_the_scorers_are_listed(service: ScriptedReward) -> None:
    lines = reward("scorers").stdout.splitlines()
    assert lines[1].split() == ["number", "1", "in_process", "The", "solution", "itself."]
    assert lines[-1] == "limits: max_items_per_request 1,000, max_request_bytes 1,048,576"
    one = reward("scorers", "number").stdout.splitlines()
    assert one[0] == "number, version 1, runs in_process: The solution itself."
    assert one[2].split(maxsplit=3) == ["scale", "number", "1.0", "What it is multiplied by."]


def test_a_value_that_json_cannot_hold_fails_only_its_row(tmp_path: Path) -> None:
    table = pa.table({"solution": ["1", "2"], "extra_info": pa.array([{"b": b"\xff"}, {"b": None}])})
    pq.write_table(table, tmp_path / "f.parquet")
    done = reward("score", tmp_path / "f.parquet")
    assert "0  –  invalid_input: ground_truth or extra_info holds what JSON cannot" in done.stdout
    assert "1  2  group=1" in done.stdout
