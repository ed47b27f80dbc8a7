"""`tandem reward …` against a scripted service, for the tests of its commands."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from tandem.services.cli import app
from tests.support.scripted_reward import scripted, service

__all__ = ["complaints", "reward", "scripted", "service"]


def reward(*arguments: object, code: int = 0, given: str | None = None) -> Result:
    """Runs a command of `tandem reward` and checks its exit code."""
    done = CliRunner().invoke(app, ["reward", *map(str, arguments)], input=given)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == code, done.output
    return done


def complaints(done: Result) -> list[str]:
    """The lines on standard error, each without `tandem: `."""
    lines = done.stderr.splitlines()
    assert all(line.startswith("tandem: ") for line in lines)
    return [line.removeprefix("tandem: ") for line in lines]
