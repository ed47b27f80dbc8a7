"""Logging: text and JSON lines with their fields, levels, and no duplicate handlers after a second call."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.logging_setup import configure_logging

log = logging.getLogger("tandem.services.anything")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The logger `tandem`, restored after the test."""
    logger = logging.getLogger("tandem")
    handlers, level = list(logger.handlers), logger.level
    for variable in ("TANDEM_LOG", "TANDEM_LOG_LEVEL"):
        monkeypatch.delenv(variable, raising=False)
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_text_lines_name_the_service_and_levels_other_than_info(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("feed", run="mine")
    configure_logging("rollout", run="mine", replica=1)
    log.debug("not shown")
    log.info("listens on %s", "127.0.0.1:1")
    log.warning("group %s is dropped", "0-3", extra={"group": "0-3"})
    out = capsys.readouterr().out
    assert out == "rollout-1: listens on 127.0.0.1:1\nrollout-1: WARNING: group 0-3 is dropped\n"


def test_json_lines_carry_the_fields(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_LOG", "json")
    configure_logging("rollout", run="mine", replica=0)
    log.info("version %d", 3, extra={"version": 3, "group": "0-3"})
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first.pop("time").endswith("+00:00")
    fields = {"run": "mine", "service": "rollout", "replica": 0}
    place = {"level": "INFO", "logger": "tandem.services.anything"}
    assert first == {**fields, **place, "message": "version 3", "version": 3, "group": "0-3"}
    assert second["level"] == "ERROR" and "KeyError" in second["exception"] and "group" not in second


@pytest.mark.parametrize(("level", "shown"), [("debug", 3), ("INFO", 2), ("WARNING", 1)])
def test_records_below_the_level_are_not_written(
    level: str, shown: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_LOG_LEVEL", level)
    configure_logging("feed")
    for write in (log.debug, log.info, log.warning):
        write("a line")
    assert len(capsys.readouterr().out.splitlines()) == shown


@pytest.mark.parametrize("variable", ["TANDEM_LOG", "TANDEM_LOG_LEVEL"])
def test_an_unknown_value_is_refused_naming_the_known_ones(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "loud")
    with pytest.raises(ConfigError, match=rf"{variable}='loud' is not one of (text, json|DEBUG, INFO)"):
        configure_logging("feed")
