"""`tandem data check`: every row is checked, the file is summarized, three exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tandem.protos.errors import DataError, ModelError
from tandem.services.commands.data_check import check_file, show
from tests.support.dataset_files import BAD_ROWS, chat_folder, verl_row, write_lines, write_parquet


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(chat_folder(tmp_path_factory.mktemp("model")))


def test_a_file_without_a_fault_exits_with_0(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_parquet(tmp_path / "good.parquet", [verl_row(f"{n}+1=?", str(n + 1), split="x") for n in range(30)])
    report = check_file(file, model_path=model, max_prompt_tokens=60)
    assert (report.num_rows, report.num_usable, report.faults) == (30, 30, [])
    assert (
        report.roles == {"user": 30} and report.data_sources == {"arithmetic": 30} and len(report.prompt_lengths) == 30
    )
    assert show(report, Console()) == 0
    told = capsys.readouterr().out
    assert "30 of 30 rows can be used; every row is fine" in told and "split (not read)" in told and "user 30" in told


def test_every_fault_is_found(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [verl_row("1+1=?", "2"), *(row for _, row in BAD_ROWS), verl_row("1+1=?", "2"), verl_row("1+1=?", "3")]
    file = write_lines(tmp_path / "bad.jsonl", rows)
    report = check_file(file, model_path=model, max_prompt_tokens=200)
    reasons = [*(reason for reason, _ in BAD_ROWS), "duplicate", "contradiction"]
    assert [(fault.index, fault.reason) for fault in report.faults] == list(enumerate(reasons, 1))
    assert report.num_usable == 3
    assert show(report, Console()) == 1
    told = capsys.readouterr().out
    assert f"3 of {len(rows)} rows can be used; {len(report.faults)} faults" in told
    assert "unknown_role" in told and "reward_model.ground_truth" in told


def test_lengths_are_checked_only_with_a_model(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "f.jsonl", [verl_row("a" * 5000, "1")])
    assert check_file(file).faults == []
    with pytest.raises(DataError, match="needs a model to count them"):
        check_file(file, max_prompt_tokens=10)


def test_a_long_list_of_faults_is_shortened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(check_file(write_lines(tmp_path / "f.jsonl", [verl_row("[bold]a", "1")] * 50)), Console()) == 1
    told = capsys.readouterr().out
    assert "and 29 more" in told and "duplicate" in told and "98.0%" in told


def test_an_unreadable_file_or_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^dataset .*: no such file"):
        check_file(tmp_path / "absent.parquet")
    file = write_lines(tmp_path / "f.jsonl", [verl_row("a", "1")])
    with pytest.raises(ModelError, match="no such folder"):
        check_file(file, model_path=str(tmp_path / "no-model"))
