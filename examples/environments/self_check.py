"""An agent: the policy answers a question, and then checks its answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class SelfCheck:
    """The reward is 1 if the last number of the checked answer is the row's."""

    async def run(self, data: Mapping[str, Any], *, base_url: str, api_key: str) -> Mapping[str, Any]:
        messages: list[Any] = list(data["prompt"])
        numbers = []
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for question in ("Is that right? Give the number once more.", ""):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                said = answer.choices[0].message.content or ""
                numbers.append(last_number(said))
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": question}]
        truth = last_number(str(data["ground_truth"]))
        return {"reward": float(numbers[1] == truth), "was_right_at_first": numbers[0] == truth}


def last_number(text: str) -> str:
    """The last number of a text without its commas; empty if there is none."""
    return (NUMBER.findall(text) or [""])[-1].replace(",", "")
