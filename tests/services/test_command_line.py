"""What all commands share: secrets from files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.services.command_line import read_secret_files


def test_the_url_of_redis_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "redis_url"
    file.write_text("rediss://tandem:secret@redis:6379/0\n")
    monkeypatch.setenv("TANDEM_REDIS_URL_FILE", str(file))
    monkeypatch.setenv("TANDEM_REDIS_URL", "")
    read_secret_files()
    with monkeypatch.context() as inner:
        inner.setenv("TANDEM_REDIS_URL", "redis://given/0")
        read_secret_files()
        assert os.environ["TANDEM_REDIS_URL"] == "redis://given/0", "a value that is given comes first"
    assert os.environ["TANDEM_REDIS_URL"] == "rediss://tandem:secret@redis:6379/0"


def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_REDIS_URL_FILE", str(tmp_path / "missing"))
    monkeypatch.setenv("TANDEM_REDIS_URL", "")
    with pytest.raises(SystemExit, match="2"):
        read_secret_files()
    assert capsys.readouterr().err == (
        f"tandem: TANDEM_REDIS_URL_FILE: {tmp_path}/missing: No such file or directory; mend that, or set "
        "TANDEM_REDIS_URL\n"
    )
