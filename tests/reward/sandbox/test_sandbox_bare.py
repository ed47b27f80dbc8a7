"""The sandbox without isolation, for recipes that allow it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import psutil
import pytest

from tandem.reward.sandbox.inside import seccomp as filter_program
from tandem.reward.sandbox.launcher import BareLauncher
from tandem.reward.sandbox.layout import layout_for
from tandem.reward.sandbox.sandbox import Limits
from tests.support.sandbox_runs import DAEMON, DISK_BYTES, LIMITS, MANY, SECRET, alive, said, settles


def test_without_isolation_programs_have_limits_and_an_empty_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_TEST_SECRET", SECRET)
    (tmp_path / "kept").write_text("x")
    sandbox = BareLauncher(layout_for(), DISK_BYTES).open(seccomp=filter_program.available())
    try:
        sandbox.await_ready(60.0)
        go = partial(sandbox.run, "script", limits=LIMITS)
        folder = said(go(["", "import os\nprint(os.getcwd())"]))
        assert SECRET not in said(go(["", "import os\nprint(os.environ)"]))
        assert go(["", "x = bytearray(600 << 20)"]).failure == "memory"
        assert (
            sandbox.run("script", ["", "while True: pass"], Limits(cpu_seconds=0.5, wall_seconds=5.0)).failure == "time"
        )
        assert go(["", "import os\nwhile True: os.write(1, b'x' * 1000)"]).failure == "output"
        said(go(["", f"import os\nos.symlink({str(tmp_path)!r}, 'link')"]))
        assert alive(sandbox)
    finally:
        sandbox.close()
    assert not Path(folder).exists() and (tmp_path / "kept").exists(), "a link in the working folder is not followed"


def test_without_isolation_daemons_are_killed(tmp_path: Path) -> None:
    sandbox = BareLauncher(layout_for(), DISK_BYTES).open(seccomp=False)
    try:
        sandbox.await_ready(60.0)
        assert sandbox.run("script", ["", DAEMON.format(folder=str(tmp_path))], MANY).exit_code == 0
        daemon = int((tmp_path / "beat").read_text())
        settles(lambda: not psutil.pid_exists(daemon), "it lives")
    finally:
        sandbox.close()
