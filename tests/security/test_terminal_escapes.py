"""Text of others (answers, details of scorers, names) cannot command a terminal or pretend to be lines of a log."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from tandem.protos.contracts import Scored, Unscored
from tandem.protos.error_text import escaped
from tandem.protos.errors import UserError
from tandem.services.cli import app
from tandem.services.command_line import cell, exit_code_of, print_error, print_line, print_text
from tandem.services.commands.data_check import check_file, show
from tandem.services.commands.evaluate import _report
from tandem.services.commands.reward_display import score_line
from tandem.services.logging_setup import configure_logging
from tandem.services.run.progress import ProgressSnapshot, plain_line, table
from tandem.services.trainer.evaluation import Evaluation
from tandem.services.trainer.generations import SetResult
from tests.support.dataset_files import verl_row, write_lines
from tests.support.reward_process import running_reward
from tests.support.run_inputs import recipe_of, small_values

ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eright\r\x08<script>alert(1)</script>[red]x[/red]"
PLAIN = escaped(ATTACK)
log = logging.getLogger("tandem.services.anything")


def is_harmless(text: str) -> bool:
    return all(one.isprintable() or one == "\n" for one in text)


@pytest.fixture
def console() -> Console:
    """A terminal that shows no colours, so that every control character is someone else's."""
    return Console(file=StringIO(), force_terminal=True, color_system=None, width=400)


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_escaped_text_is_readable_and_harmless() -> None:
    assert PLAIN == r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202eright\r\x08<script>alert(1)</script>[red]x[/red]"
    assert is_harmless(PLAIN) and escaped("Grüße, 分 😀") == "Grüße, 分 😀"
    assert escaped("a\nb\x1b", kept="\n") == "a\nb\\x1b" and escaped("a\nb") == r"a\nb"
    assert escaped("\ud800") == r"\ud800", "half a surrogate pair cannot be printed"


@pytest.mark.parametrize("write", [print_text, print_error], ids=["print_text", "print_error"])
def test_lines_of_commands(write: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    write(f"{ATTACK}\ntandem: everything is fine")
    out = "".join(capsys.readouterr())
    assert out.removeprefix("tandem: ") == f"{PLAIN}\\ntandem: everything is fine\n"


def test_errors_of_any_command(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise UserError(ATTACK)

    assert exit_code_of(work) == 2
    assert capsys.readouterr().err == f"tandem: {PLAIN}\n"


def test_lines_and_tables_of_a_console(console: Console) -> None:
    print_line(console, ATTACK)
    grid = Table.grid()
    grid.add_row(cell(ATTACK))
    console.print(grid)
    assert shown(console).split() == [PLAIN, PLAIN], "neither commands nor markup"


def test_a_class_in_a_line_is_no_emoji(console: Console) -> None:
    print_line(console, "x.py:A: x.py is no file")
    assert shown(console) == "x.py:A: x.py is no file\n"


def test_progress_of_a_run(console: Console) -> None:
    snapshot = ProgressSnapshot(step=1, total=2, groups={f"dropped:{ATTACK}": 1})
    states = {ATTACK: ("restarting", 1, 1)}
    console.print(table(snapshot, states, 1.0))
    print_line(console, plain_line(snapshot, states, 1.0))
    assert is_harmless(shown(console)) and shown(console).count(PLAIN) == 4


def test_scores_and_evaluations(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert is_harmless(score_line(0, Scored(1.0, {ATTACK: 1.0})) + score_line(0, Unscored("crashed", ATTACK)))
    sources = {source: {"num_prompts": 1, "mean@1": 1.0} for source in (ATTACK, "b")}
    one = SetResult(2, 2, 1, 0, 0, {ATTACK: 1}, failed=ATTACK, data_sources=sources)
    result = Evaluation(None, None, None, num_rows=2, num_scored=1, unscored={}, seconds=1.0, sets={"train": one})
    _report(recipe_of(small_values(tmp_path), data={"eval_file": str(tmp_path / "train.jsonl")}), result)
    told = capsys.readouterr()
    assert told.out.count(PLAIN) == 2 and is_harmless(told.out)
    assert PLAIN in told.err and is_harmless(told.err)


def test_a_check_of_data(console: Console, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", [{**verl_row("1", "1"), "data_source": ATTACK, ATTACK: 1}])
    show(check_file(str(file)), console)
    assert PLAIN in shown(console).replace("\n", "") and is_harmless(shown(console))


@pytest.fixture
def restored() -> Iterator[None]:
    logger = logging.getLogger("tandem")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs(form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, restored: None) -> None:
    monkeypatch.setenv("TANDEM_LOG", form)
    configure_logging("reward")
    log.warning("unscored: %s", f"{ATTACK}\nreward: all is well")
    try:
        raise ValueError(ATTACK)
    except ValueError:
        log.exception("a bug")
    out = capsys.readouterr().out
    assert is_harmless(out)
    assert not any(line.startswith("reward: all is well") for line in out.splitlines())
    if form == "json":
        first, second = map(json.loads, out.splitlines())
        assert ATTACK in first["message"] and ATTACK in second["exception"], "nothing is lost"
    else:
        assert f"ValueError: {PLAIN}" in out.splitlines(), "the traceback keeps its lines"


def test_what_a_service_says_of_answers(tmp_path: Path) -> None:
    """From an answer through a user's function, a real service and its client to the command's output."""
    function = tmp_path / "function.py"
    function.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 1.0, solution_str: 0.5} if ground_truth else int(solution_str)\n"
    )
    answers = write_lines(
        tmp_path / "answers.jsonl",
        [{"solution": ATTACK, "ground_truth": "1"}, {"solution": ATTACK, "extra_info": {"a": 1}}],
    )
    with running_reward(
        tmp_path / "data", f"reward.scorer={function}:compute_score", "reward.num_workers=1"
    ) as address:
        for command in (
            ["score", str(answers)],
            ["submit", str(answers), "--name", ATTACK, "--watch"],
            ["jobs"],
            ["score", "--solution", ATTACK],
        ):
            done = CliRunner().invoke(app, ["reward", *command, "--address", address])
            assert done.exit_code == 0, done.output
            assert is_harmless(done.output), done.output
            if command[0] == "score" and command[1] == str(answers):
                assert r"\x1b[2J" in done.output, "the text is shown"
