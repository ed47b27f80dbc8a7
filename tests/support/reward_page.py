"""Runs every command and program in docs/reward.md against a real service and inserts their output.

`python -m tests.support.reward_page` rewrites the page; tests/project/test_reward_document.py compares it.

A `console` block has commands after `$ ` and their output; a `text` block after a `python` block has that program's
output. Job ids, times and the port differ between runs, so the page has fixed values for them. Long outputs and lines
are cut. The lists after `<!-- scorers -->`, `<!-- limits -->` and `<!-- errors -->` are made from the code.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from tandem.protos import errors
from tandem.reward.registry import SCORERS, describe
from tandem.services.cli import app
from tandem.services.clients import RewardClient
from tandem.services.commands.reward_display import number
from tests.support.grpcurl import grpcurl
from tests.support.paths import ROOT
from tests.support.reward_process import running_reward

PAGE = ROOT / "docs" / "reward.md"
SHOWN_ADDRESS = "127.0.0.1:50051"
SHOWN_IDS = ("0660ca468f1360c816690e7ac842a6a1", "0660ca47159750ed80bfe785e543c89b", "0660ca46c8d1f7a2b94e03d15c86f702")
SHOWN_TIME = "2026-11-21 14:35"
SHOWN_SECONDS = {"createdAt": "1795271712.25", "finishedAt": "1795271712.5", "expiresAt": "1795876512.5"}
MAX_LINES, MAX_COLUMNS = 20, 120
ERRORS = (
    *("DataError", "SizeError", "ScorerError", "UnknownJobError", "JobExistsError", "JobError", "JobLimitError"),
    *("EnvironmentLackError", "DeadlineError", "UnavailableError"),
)
WAIT_SECONDS = 60.0

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_ID = re.compile(r"\b[0-9a-f]{32}\b")


@dataclass
class Reader:
    """Runs the page's commands in an empty folder."""

    address: str
    ids: dict[str, str] = field(default_factory=dict)
    """The page's fixed value for each job id."""

    def follow(self, page: str) -> str:
        """The page with the real output in place of the present one."""
        done = ""
        place, printed = 0, ""
        for block in _BLOCK.finditer(page):
            kind, text = block.groups()
            before = page[place : block.start()]
            if kind == "console":
                text = "".join(map(self._console, commands_of(text)))
            elif kind == "python":
                printed = self._python(text)
            elif kind == "text":
                text = printed
            elif kind == "toml" and (named := re.search(r"This is `(\w+\.toml)`:\s*\Z", before)):
                text = (ROOT / "examples" / "rubrics" / named[1]).read_text()
            done += f"{before}```{kind}\n{text}```"
            place = block.end()
        return self._with_lists(done + page[place:])

    def _console(self, command: str) -> str:
        real = command.replace(SHOWN_ADDRESS, self.address)
        for actual, shown in self.ids.items():
            real = real.replace(shown, actual)
        with RewardClient(self.address) as client:
            for job in client.jobs():
                client.wait(job.job_id, timeout_seconds=WAIT_SECONDS)  # so that its figures are equal in every run
        return f"$ {command}\n{self._shown(run(real, self.address))}"

    def _python(self, text: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(text.replace(SHOWN_ADDRESS, self.address), str(PAGE), "exec"), {"__name__": "page"})
        return self._shown(said.getvalue())

    def _shown(self, output: str) -> str:
        for found in _ID.findall(output):
            if found not in self.ids and found not in self.ids.values():
                self.ids[found] = SHOWN_IDS[len(self.ids)]
        output = _ID.sub(lambda found: self.ids.get(found[0], found[0]), output).replace(self.address, SHOWN_ADDRESS)
        output = re.sub(r"\b20\d\d-\d\d-\d\d \d\d:\d\d\b", SHOWN_TIME, output)
        for key, shown in SHOWN_SECONDS.items():
            output = re.sub(rf'"{key}": [\d.]+', f'"{key}": {shown}', output)
        lines = output.splitlines()
        if len(lines) > MAX_LINES:
            lines = [*lines[: MAX_LINES - 1], "…"]
        lines = [line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 1] + "…" for line in lines]
        return "".join(f"{line.rstrip()}\n" for line in lines)

    def _with_lists(self, page: str) -> str:
        """Fills the lists of scorers, limits and errors; keeps the page's explanation of each limit."""
        with RewardClient(self.address) as client:
            limits = client.scorers().limits
        scorers = describe()
        explained = dict(re.findall(r"^- `(\w+)` \([\d,.]+\): ((?:.+\n)(?:  .+\n)*)", page, re.M))
        classes = [getattr(errors, name) for name in ERRORS]
        lists = {
            "scorers": [f"`{one.name}` (version {one.version}, `{one.isolation}`): {one.summary}" for one in scorers],
            "limits": [f"`{one}` ({number(limits[one])}): {explained.get(one, '?')}" for one in in_order(limits)],
            "errors": [f"`{one.__name__}` (`{one.grpc_code}`): {inspect.getdoc(one)}" for one in classes],
        }
        for name, texts in lists.items():
            found = re.search(rf"(?<=<!-- {name} -->\n)(?:- .*\n(?:  .*\n)*)+", page)
            assert found, f"the page lacks the list of {name}"
            page = page[: found.start()] + "".join(f"{item(text)}\n" for text in texts) + page[found.end() :]
        return page


def in_order(limits: object) -> list[str]:
    return sorted(limits, key=lambda name: (not name.startswith("max_"), name))


def item(text: str) -> str:
    """The first paragraph of a text as an item of a list."""
    options = {"initial_indent": "- ", "subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(" ".join(text.partition("\n\n")[0].split()), MAX_COLUMNS, **options)


def commands_of(block: str) -> list[str]:
    """The commands of a block. A line that ends with a backslash continues, as does one with `<<'END'` until END."""
    found: list[str] = []
    continued = here_document = False
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
        elif continued or here_document:
            found[-1] += f"\n{line}"
        else:
            continue
        continued = line.endswith("\\")
        here_document = (here_document or "<<'END'" in line) and line != "END"
    return found


def run(command: str, address: str) -> str:
    """The output of the command, including errors."""
    head, _, given = command.partition(" <<'END'\n")
    words = shlex.split(head.replace("\\\n", " "))
    if words[:3] == ["tandem", "reward", "serve"]:
        return f"reward: listens on {address}\n"  # the fixture has started the service
    if words[0] == "grpcurl":
        return grpcurl(words[1:], given.removesuffix("END"))
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout
    assert words[0] == "tandem", command
    result = CliRunner().invoke(app, words[1:])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.output


@contextlib.contextmanager
def reading_folder(address: str) -> Iterator[None]:
    """An empty working folder with links to examples/ and protos/, and the address in the environment."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "protos"):
            (Path(folder) / name).symlink_to(ROOT / name)
        with contextlib.chdir(folder), mock.patch.dict(os.environ, TANDEM_REWARD_ADDRESS=address):
            yield


def followed() -> str:
    """The page with the real output."""
    with running_reward() as address, reading_folder(address):
        return Reader(address).follow(PAGE.read_text(encoding="utf-8"))


def remote_scorers() -> set[str]:
    """Scorers that clients can use only under a name that the service declares."""
    return {name for name, kind in SCORERS.items() if kind.ISOLATION == "remote"}


if __name__ == "__main__":
    PAGE.write_text(followed(), encoding="utf-8")
