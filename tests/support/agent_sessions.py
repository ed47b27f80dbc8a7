"""Sessions of agents on a served proxy, with a sampler that says given words."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tandem.protos.contracts import AgentResult
from tandem.protos.types import SamplingParameters, Trajectory
from tandem.rollout.environments.agent_session import AgentSession
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tandem.services.rollout.openai_proxy import OpenAIProxy
from tests.support.agents import client_of
from tests.support.episodes import SAMPLING, ScriptedSampler, prompt_of

AGENT = "tests.support.agents:Scripted"


class Served:
    """A session on a served proxy, and its client."""

    def __init__(self, proxy: str, sessions: dict[str, AgentSession], session: AgentSession, name: str) -> None:
        self.base_url, self.sessions, self.session, self.name = f"{proxy}/sessions/{name}/v1", sessions, session, name
        sessions[name] = session
        self.client = client_of(self.base_url, session.api_key)

    async def say(self, *messages: Any, **more: Any) -> Any:
        answer = await self.client.chat.completions.create(model="any", messages=messages, **more)
        return answer.choices[0].message.model_dump(exclude_none=True)

    def row(self) -> Trajectory:
        return self.session.trajectory(AgentResult(1.0))


@contextlib.asynccontextmanager
async def served(
    encoder: ChatEncoder,
    words: Callable[[int], Sequence[str]],
    number: int = 1,
    sampling: SamplingParameters = SAMPLING,
    stops_at: tuple[int, int] | None = None,
    **config: Any,
) -> AsyncIterator[list[Served]]:
    """Sessions of the trajectories 0 … number − 1."""
    sessions: dict[str, AgentSession] = {}
    settings, sampler = EnvironmentConfig(path=AGENT, **config), ScriptedSampler(words, stops_at=stops_at)
    async with OpenAIProxy(sessions).serving() as address, contextlib.AsyncExitStack() as stack:
        found = []
        for row in range(number):
            session = AgentSession(sampler, EpisodeEncoder(encoder), settings, prompt_of(), sampling, row)
            found.append(Served(address, sessions, session, f"session-{row}"))
            stack.push_async_callback(found[-1].client.close)
        yield found
