"""`tandem report`: writes a run's charts and samples into one HTML file."""

from __future__ import annotations

from pathlib import Path

from tandem.protos.errors import UserError
from tandem.protos.extras import missing_extra_named
from tandem.services.run.folder import cannot_write, write_text

REPORT_FILE = "report.html"


def write_report(folder: Path, other: Path | None, output: Path | None) -> Path:
    """Writes the report of a run folder and returns its path. Raises UserError if the runs cannot be compared or read,
    or the report cannot be written.
    """
    if other and other.resolve() == folder.resolve():
        raise UserError(f"{other} is the same run; name another one to compare it with")
    with missing_extra_named():
        from tandem.services.report.page import report_html
        from tandem.services.report.run_data import RunData

    file = output or folder / REPORT_FILE
    text = report_html(RunData.load(folder), RunData.load(other) if other else None)
    try:
        write_text(file, text)
    except OSError as error:
        raise cannot_write(file, error) from None
    return file
