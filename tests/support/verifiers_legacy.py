"""An environment for verifiers up to 0.3. It is imported where verifiers is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import verifiers as vf

ROWS = [{"question": f"{one} and 1", "answer": f"{one + 1}", "info": {"hint": f"{one}"}} for one in (1, 2)]


def look_up(word: str) -> str:
    """Looks a word up.

    Args:
        word: The word.
    """
    return f"{word}!"


class Hints(vf.MultiTurnEnv):
    """The row's hint answers the policy."""

    async def env_response(self, messages: Sequence[Any], state: Mapping[str, Any], **_: Any) -> list[Any]:
        return [vf.UserMessage(content=f"hint {state['info']['hint']}")]


def quarters(completion: Sequence[Any], answer: str, **_: Any) -> float:
    """A quarter for each turn, and the row's answer."""
    return 0.25 * sum(one["role"] == "assistant" for one in completion) + float(answer)


def hints(turns: int = 2) -> vf.Environment:
    data = datasets.Dataset.from_list(ROWS)
    return Hints(dataset=data, system_prompt="Add.", rubric=vf.Rubric(funcs=[quarters]), max_turns=turns)


def tools() -> vf.Environment:
    data = datasets.Dataset.from_list(ROWS)
    return vf.ToolEnv(dataset=data, tools=[look_up], rubric=vf.Rubric(funcs=[quarters]), max_turns=3)


def of_groups() -> vf.Environment:
    def best(completions: Sequence[Any], **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=datasets.Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[best]))
