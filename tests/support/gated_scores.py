"""A scorer that scores only so many groups of a run as a test allows, so that the run is not over before a kill."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT
from tests.support.scorers import digit_share


class Gate:
    """How many groups of different prompts may be scored in all. One that comes later waits until more are allowed."""

    def __init__(self, folder: Path) -> None:
        self._allowed = folder / "allowed"
        self._scored = folder / "scored"
        """Folder with a file for each prompt that has passed."""
        self._scored.mkdir(parents=True, exist_ok=True)

    def allow(self, num_groups: int) -> None:
        draft = self._allowed.with_name("draft")
        draft.write_text(str(num_groups))
        draft.rename(self._allowed)

    def wait(self, prompt: str) -> None:
        mark = self._scored / prompt
        while not mark.exists() and len(list(self._scored.iterdir())) >= int(self._allowed.read_text()):
            time.sleep(0.02)
        mark.touch()


def gated_reward(folder: Path) -> Mapping[str, object]:
    """The recipe's section, for one worker, which scores one group after the other."""
    scorer = f"{ROOT}/tests/support/gated_scores.py:gated_digit_share"
    return {"scorer": scorer, "arguments": {"folder": str(folder)}, "timeout_seconds": 120.0}


def gated_digit_share(solution_str: str, extra_info: Mapping[str, Any], folder: str, **item: Any) -> float:
    """As `digit_share`, once the gate lets the prompt through."""
    Gate(Path(folder)).wait(extra_info["prompt"][0]["content"])
    return digit_share(solution_str=solution_str, **item)
