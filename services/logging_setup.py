"""Logging of the services with the standard library. The main function of each process configures it once.

`TANDEM_LOG=text` (default) writes `SERVICE: MESSAGE` lines, with the level before the message unless it is INFO.
`TANDEM_LOG=json` writes JSON lines with run, service and replica, and with group and version if a message adds them by
`log.info(..., extra={"group": "0-17", "version": 3})`. `TANDEM_LOG_LEVEL` is the lowest level written (default INFO).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TextIO

from tandem.protos.error_text import escaped
from tandem.protos.errors import ConfigError

FIELDS = ("run", "service", "replica", "group", "version")


def configure_logging(service: str, *, run: str = "", replica: int | None = None) -> None:
    """Sends the logs of `tandem.*` to standard output. May be called again with other fields. Raises ConfigError if
    TANDEM_LOG or TANDEM_LOG_LEVEL has an unknown value.
    """
    form = _choice("TANDEM_LOG", ("text", "json"), default="text")
    level = _choice("TANDEM_LOG_LEVEL", ("DEBUG", "INFO", "WARNING", "ERROR"), default="INFO")
    fields = {"run": run, "service": service, "replica": replica}
    handler = _StandardOutput()
    handler.setFormatter(_JsonFormatter(fields) if form == "json" else _TextFormatter(fields))
    logger = logging.getLogger("tandem")
    for earlier in [one for one in logger.handlers if isinstance(one, _StandardOutput)]:
        logger.removeHandler(earlier)
    logger.addHandler(handler)
    logger.setLevel(level)


def _choice(variable: str, choices: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable) or default
    found = next((one for one in choices if one.lower() == value.lower()), None)
    if found is None:
        raise ConfigError(f"{variable}={value!r} is not one of {', '.join(choices)}")
    return found


class _StandardOutput(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stdout` and flushes each line."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


class _TextFormatter(logging.Formatter):
    def __init__(self, fields: dict[str, str | int | None]) -> None:
        replica = fields["replica"]
        name = str(fields["service"]) if replica is None else f"{fields['service']}-{replica}"
        super().__init__(f"{name}: %(level)s%(message)s", defaults={"level": ""})

    def format(self, record: logging.LogRecord) -> str:
        record.level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        return escaped(super().format(record), "\n")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escaped(super().formatMessage(record))  # one line: a text in it cannot pretend to be another message


class _JsonFormatter(logging.Formatter):
    def __init__(self, fields: dict[str, str | int | None]) -> None:
        super().__init__()
        self._fields = {name: value for name, value in fields.items() if value not in (None, "")}

    def format(self, record: logging.LogRecord) -> str:
        own = {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **self._fields,
            **own,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
