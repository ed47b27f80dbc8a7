"""Episodes of agents: programs that call the policy by OpenAI's API until they have done their task."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from tandem.protos.contracts import AgentResult
from tandem.protos.errors import EpisodeError
from tandem.protos.types import Trajectory, task_of
from tandem.rollout.environments.agent_session import AgentEncoder, AgentSession
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler, RunningEpisode
from tandem.rollout.environments.limits import Limits
from tandem.rollout.environments.process import EnvironmentPool, RemoteEnvironment
from tandem.rollout.sampler import Sampler


class AgentSampler(EpisodeSampler):
    """Samples the trajectories of agents. An interrupted one begins anew.

    `sessions` has those of the running agents by id. Their calls arrive at `address`, an HTTP URL, which must be set
    before the first episode: under `/sessions/<id>/v1`.
    """

    def __init__(
        self, sampler: Sampler, pool: EnvironmentPool, encoder: AgentEncoder, config: EnvironmentConfig, seed: int
    ) -> None:
        super().__init__(sampler, pool, encoder, config, seed)
        self.sessions: dict[str, AgentSession] = {}
        self.address = ""
        self._agents = pool
        self._agent_encoder = encoder

    async def _attempt(self, running: RunningEpisode) -> Trajectory:
        session = AgentSession(
            self._sampler,
            self._agent_encoder,
            self._config,
            running.prompt,
            running.sampling,
            running.trajectory_id,
        )
        name = uuid.uuid4().hex
        agent = await self._agents.open(f"{running.name}/{name}")
        self.sessions[name] = session
        try:
            result = await self._run(agent, session, name, running)
        finally:
            del self.sessions[name]
            session.end()
            with contextlib.suppress(EpisodeError):  # what it did is known; its process frees the rest
                await agent.close()
        if result.error and not session.has_reached_limit:
            raise EpisodeError(f"run: {result.error}")
        return self._ended(session.trajectory(result))

    async def _run(
        self, agent: RemoteEnvironment, session: AgentSession, name: str, running: RunningEpisode
    ) -> AgentResult:
        """Its result, or a reward of 0 past `episode_seconds`. Raises EpisodeError if the agent's process dies, or it
        goes on for `step_seconds` without a call.
        """
        data, base_url = task_of(running.prompt), f"{self.address}/sessions/{name}/v1"
        run = asyncio.create_task(agent.run(data, base_url=base_url, api_key=session.api_key))
        ends: list[asyncio.Future[AgentResult]] = [session.failed, run]
        limits = Limits(self._config)
        try:
            while (left := session.seconds_left()) > 0:
                left = min(left, max(0.0, limits.episode_seconds_left()))
                await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if ended := [one for one in ends if one.done()]:
                    return ended[0].result()
                if limits.episode_seconds_left() <= 0.0:
                    return session.end_by_time()
        finally:
            run.cancel()
        await agent.end_if_blocked()
        raise EpisodeError(f"run has neither ended nor called the policy for {self._config.step_seconds:.3g} s")
