"""Agents for the tests, which call the policy with OpenAI's client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def client_of(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


class Scripted:
    """Plays the script named by its argument. Its reward is 0.5 for each answer."""

    def __init__(self, script: str, times: int = 3) -> None:
        self.script = script
        self.times = times

    async def run(self, data: Mapping[str, Any], *, base_url: str, api_key: str) -> float | Mapping[str, Any]:
        async with client_of(base_url, api_key) as client:
            return await getattr(self, self.script)(client, list(data["prompt"]))

    async def after_first_answer(self) -> None:
        """Called in the middle of the script `rewriting`."""

    async def conversation(self, client: openai.AsyncOpenAI, messages: list[Any]) -> Mapping[str, Any]:
        """As many turns as it may, each the answer to what was said before."""
        said: list[str] = []
        try:
            for _ in range(self.times):
                message = (await client.chat.completions.create(model="any", messages=messages)).choices[0].message
                said.append(message.content or "")
                messages += [message.model_dump(exclude_none=True), {"role": "user", "content": f"{said[-1]}?"}]
        except openai.BadRequestError as error:
            return {"reward": 0.5 * len(said), "code": error.code}
        return {"reward": 0.5 * len(said), "said": said}

    async def careless(self, client: openai.AsyncOpenAI, messages: list[Any]) -> float:
        """Never ends by itself."""
        while True:
            message = (await client.chat.completions.create(model="any", messages=messages)).choices[0].message
            messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "?"}]

    async def rewriting(self, client: openai.AsyncOpenAI, messages: list[Any]) -> Mapping[str, Any]:
        """Two turns, then one after a summary of the first, and one of a sub-agent at the same time."""

        async def said(*asked: Any) -> tuple[str, int]:
            answer = await client.chat.completions.create(model="any", messages=[*messages, *asked])
            assert answer.usage is not None
            return answer.choices[0].message.content or "", answer.usage.completion_tokens

        def after(text: str) -> list[Any]:
            return [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]

        first, first_tokens = await said()
        await self.after_first_answer()
        second, second_tokens = await said(*after(first))
        rest = await asyncio.gather(said(*after(f"{first[:2]}..")), said({"role": "system", "content": "Help."}))
        num_letters = sum(one.isalpha() for one in first + second)
        return {"reward": 0.25 * num_letters, "sampled": first_tokens + second_tokens + sum(one for _, one in rest)}


class Halted(Scripted):
    """The agents of the first `num_free` rows play the script to its end. The others wait in its middle until there is
    the file `go` in the folder. There is `halted` when one of them waits.
    """

    rows: ClassVar[list[str]] = []
    """In the order in which their first agents began, in this process."""

    def __init__(self, script: str, num_free: int, marks: str) -> None:
        super().__init__(script)
        self.num_free = num_free
        self.marks = Path(marks)

    async def run(self, data: Mapping[str, Any], *, base_url: str, api_key: str) -> float | Mapping[str, Any]:
        row = str(data["prompt"])
        if row not in self.rows:
            self.rows.append(row)
        self.is_free = self.rows.index(row) < self.num_free
        return await super().run(data, base_url=base_url, api_key=api_key)

    async def after_first_answer(self) -> None:
        while not self.is_free and not (self.marks / "go").exists():
            (self.marks / "halted").touch()
            await asyncio.sleep(0.05)
