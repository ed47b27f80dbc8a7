"""Notes of what vLLM's engine does in its process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.rollout.vllm import shared_prompts


def note_copies(file: Path) -> None:
    """Writes for each step of an engine that this process starts how many tokens of prompts one row computed for
    another one.
    """
    copied_tokens = shared_prompts.copied_tokens

    def noted(*arguments: Any) -> tuple[list[int], list[int]]:
        sources, slots = copied_tokens(*arguments)
        with file.open("a") as opened:
            opened.write(f"{len(sources)}\n")
        return sources, slots

    shared_prompts.copied_tokens = noted
