"""Tasks for verifiers 0.4, with the program that does them. It is imported where verifiers is installed."""

from __future__ import annotations

import openai
import verifiers.v1 as vf

__all__ = ["Sums", "Twice"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def said(self, trace: vf.Trace) -> float:
        """A quarter for each turn, and 1 if the last one is the answer."""
        return 0.25 * trace.num_turns + float(trace.last_reply == self.data.answer)

    @vf.metric
    async def sampled(self, trace: vf.Trace) -> float:
        """Tokens that the policy sampled, as the trace has them."""
        return float(sum(sum(node.mask) for node in trace.nodes if node.sampled))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> list[Sum]:
        rows = [SumData(prompt=f"{one} and 1", answer=f"{one + 1}", system_prompt="Add.") for one in (1, 2)]
        return [Sum(row, self.config.task) for row in rows]


class TwiceConfig(vf.HarnessConfig):
    pass


class Twice(vf.Harness[TwiceConfig]):
    """Asks for an answer, and then once more."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: SumData,
    ) -> vf.ProgramResult:
        system, question = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
                messages.append({"role": "user", "content": "Sure?"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
