"""Where the environments of episodes come from: processes beside the sampler, or services of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from tandem.protos.contracts import JsonObject, Resume, SnapshotEnvironment


class OpenEnvironment(SnapshotEnvironment, Protocol):
    """An environment of one episode, as a sampler has it."""

    async def final_reward(self) -> float:
        """What the last turn earns besides where a limit ends the episode; 0 if the class has no such method."""
        ...


class EnvironmentSource(Protocol):
    """Makes environments of one class. All methods belong to one event loop."""

    @property
    def resume(self) -> Resume:
        """How interrupted episodes go on. Known once it has started."""
        ...

    @property
    def tools(self) -> Sequence[JsonObject]:
        """The schemas of the tools that the environment offers, in OpenAI's form. Known once it has started."""
        ...

    @property
    def unsafe_tools(self) -> Collection[str]:
        """The names of the tools whose calls may not be repeated. Known once it has started."""
        ...

    async def start(self) -> None:
        """Raises ConfigError if the class cannot be used, EpisodeError or UnavailableError if nothing can run it."""
        ...

    async def open(self, episode_id: str) -> OpenEnvironment:
        """An environment for one episode, whose calls raise EpisodeError. Raises EpisodeError if there is none."""
        ...

    async def close(self) -> None:
        """Ends what it has started."""
        ...
