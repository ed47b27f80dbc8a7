"""`tandem report`: one HTML file with charts, samples and configuration of one run, or of two."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.services.cli import app
from tandem.services.run.json_files import JsonLines
from tests.support.made_up_run import make_run


def report(*arguments: object) -> str:
    """The page that the command wrote and named."""
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return Path(done.output.strip()).read_text(encoding="utf-8")


def body_of(page: str) -> str:
    """The page from its heading to the data of its charts, which come last."""
    body = page.partition("<body>")[2]
    return body[: body.rindex("<script")] if "<script" in body else body


class Elements(HTMLParser):
    """The addresses that the elements of a page refer to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "data")]


def test_a_report_shows_a_run_and_needs_no_network(tmp_path: Path) -> None:
    page = report(make_run(tmp_path, "mine"))
    body = body_of(page)
    for title in ("Reward", "Accuracy of evaluations", "Staleness (versions)", "Tokens per second", "Trainer"):
        assert f"<h3>{title}</h3>" in body
    for title in ("Scorers: share of time in which they score", "Samplers: share of time in which they generate"):
        assert f"<h3>{title}</h3>" in body
    assert "Importance weights π_trainer/π_sampler by staleness" in body
    for title in ("Staleness of the trained answers", "Seconds of the trainer by phase"):
        assert f"<h2>{title}</h2>" in body
    assert re.search(r'accuracy after</td><td class="number">75.0%', body)
    assert "reward 1</span>" in body and "reward 0</span>" in body and "reward 0.5" not in body
    assert "run_id = &#34;mine&#34;" in body
    assert Elements(page).sources == []
    assert "secret-of" not in page and "redis://:***@127.0.0.1" in body


def test_text_of_a_model_is_not_markup(tmp_path: Path) -> None:
    body = body_of(report(make_run(tmp_path, "mine")))
    assert "<script>alert" not in body and "<b>1 + 1</b>" not in body
    assert "&lt;script&gt;alert(&#39;answer&#39;)&lt;/script&gt;" in body and "&lt;b&gt;1 + 1&lt;/b&gt;" in body


def write_samples(run: Path, version: int, rewards: Sequence[float | None], **more: Any) -> None:
    """Samples of the set `held_out`, one a prompt, right ones with the reward 1."""
    lines = JsonLines(run / "evaluations" / f"{version:06d}" / "held_out.jsonl")
    lines.path.parent.mkdir(parents=True)
    prompt = [{"role": "user", "content": "<i>a prompt</i>"}]
    fixed = {"sample": 0, "data_source": "", "prompt": prompt, "num_tokens": 7, "finish_reason": "stop"}
    for index, reward in enumerate(rewards):
        scored = {"reward": reward, "correct": reward == 1.0, "breakdown": {}, "unscored": "" if reward else "timeout"}
        answer = f"answer {index} of version {version}"
        lines.append({"index": index, "answer": answer, "settings": "", **fixed, **scored, **more})


def test_a_report_shows_right_and_wrong_samples_of_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path, "mine")
    write_samples(run, 0, [0.25, 1.0])
    write_samples(run, 2, [1.0])
    messages = [{"role": "user", "content": "<i>a prompt</i>"}, {"role": "assistant", "content": "a <turn>"}]
    episode = {"earned_reward": 0.0, "stop": "turns", "num_turns": 1, "messages": messages, "info": {}}
    write_samples(run, 10, [None, 1.0, 1.0, 1.0, 0.5], episode=episode)
    body = body_of(report(run))
    assert re.findall(r"<h3>(held_out.*)</h3>", body) == ["held_out, version 0", "held_out, version 10"]
    shown = re.findall(r"row (\d+), sample 0 · .*>(right|wrong),\s+reward ([\d.]+)</span>", body)
    first, last = [("1", "right", "1"), ("0", "wrong", "0.25")], [("1", "right", "1"), ("2", "right", "1")]
    assert shown == [*first, *last, ("4", "wrong", "0.5")]
    assert "answer 1 of version 0" in body and "ended by turns" in body
    assert body.count("assistant: a &lt;turn&gt;") == 3 and body.count("&lt;i&gt;a prompt&lt;/i&gt;") == 5


def test_two_runs_are_compared(tmp_path: Path) -> None:
    mine, other = (make_run(tmp_path / name, "same", learning_rate=rate) for name, rate in (("a", 1e-4), ("b", 3e-4)))
    page = report(mine, other, "--output", tmp_path / "both.html")
    assert str(mine) in body_of(page) and str(other) in body_of(page), "runs of one name are told apart by folder"
    assert "<td>trainer.learning_rate</td><td>0.0001</td><td>0.0003</td>" in body_of(page)


def test_a_run_that_has_trained_nothing_has_a_report(tmp_path: Path) -> None:
    body = body_of(report(make_run(tmp_path, "mine", steps=0)))
    assert "No batch is trained yet." in body


@pytest.mark.parametrize(
    "arguments",
    [
        ("missing",),
        ("mine", "missing"),
        ("mine", "mine"),
        ("other/damaged",),
        ("mine", "--output", "mine/no/such/file"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    make_run(tmp_path, "mine")
    (make_run(tmp_path / "other", "damaged") / "metrics.jsonl").write_text('{"step": 1\n')
    places = [name if name.startswith("-") else str(tmp_path / name) for name in arguments]
    done = CliRunner().invoke(app, ["report", *places])
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output
