"""Agents built with public frameworks, which know nothing of Tandem but the address and the key of their session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai

INSTRUCTIONS = "Use the tool."


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class OpenAIAgents:
    """An agent of the OpenAI Agents SDK, by the API named `api`: `chat` or `responses`."""

    def __init__(self, api: str = "chat", streams: bool = False) -> None:
        self.api = api
        self.streams = streams

    async def run(self, data: Mapping[str, Any], *, base_url: str, api_key: str) -> Mapping[str, Any]:
        import agents

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            model = agents.OpenAIResponsesModel if self.api == "responses" else agents.OpenAIChatCompletionsModel
            solver = agents.Agent(
                name="solver",
                instructions=INSTRUCTIONS,
                model=model(model="policy", openai_client=client),
                tools=[agents.function_tool(add)],
            )
            asked, settings = data["prompt"][-1]["content"], agents.RunConfig(tracing_disabled=True)
            if self.streams:
                run = agents.Runner.run_streamed(solver, asked, run_config=settings)
                seen = [event.type async for event in run.stream_events()]
            else:
                run, seen = await agents.Runner.run(solver, asked, run_config=settings), []
        return {"reward": float(run.final_output == data["ground_truth"]), "events": len(seen)}


class Team:
    """Two agents of the OpenAI Agents SDK: the first one hands the conversation over to the second."""

    async def run(self, data: Mapping[str, Any], *, base_url: str, api_key: str) -> Mapping[str, Any]:
        import agents

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
            expert = agents.Agent(name="expert", instructions="Answer.", model=model)
            desk = agents.Agent(name="desk", instructions="Pass on.", model=model, handoffs=[expert])
            asked, settings = data["prompt"][-1]["content"], agents.RunConfig(tracing_disabled=True)
            run = await agents.Runner.run(desk, asked, run_config=settings)
        return {"reward": float(run.final_output == data["ground_truth"]), "last": run.last_agent.name}


class LangGraph:
    """LangGraph's agent that calls tools in a loop, with LangChain's model for OpenAI's API."""

    async def run(self, data: Mapping[str, Any], *, base_url: str, api_key: str) -> float:
        from langchain_openai import ChatOpenAI
        from langgraph.prebuilt import create_react_agent

        model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, max_retries=0)  # type: ignore[arg-type]
        graph = create_react_agent(model, [add], prompt=INSTRUCTIONS)
        ended = await graph.ainvoke({"messages": [("user", data["prompt"][-1]["content"])]})
        return float(ended["messages"][-1].content == data["ground_truth"])
