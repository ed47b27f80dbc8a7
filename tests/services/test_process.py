from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import os
from pathlib import Path
from tandem.services.process import yield_to_others
yield_to_others()
group = Path("/proc/self/autogroup")
print(os.nice(0), group.read_text().split()[-1] if group.exists() else "none")
"""


def test_a_process_that_yields_lowers_the_priority_of_its_own_session_alone() -> None:
    group = Path("/proc/self/autogroup")
    before = (os.nice(0), group.read_text() if group.exists() else "none")
    done = subprocess.run(
        [sys.executable, "-c", CODE], start_new_session=True, capture_output=True, text=True, timeout=30, check=True
    )
    niceness, of_group = done.stdout.split()
    assert int(niceness) == before[0] + 5
    assert of_group in ("5", "none")
    assert (os.nice(0), group.read_text() if group.exists() else "none") == before
