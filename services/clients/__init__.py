"""Clients of the reward service: `RewardClient`, and `AsyncRewardClient` for programs with an event loop.

    from tandem.services.clients import RewardClient

    with RewardClient("127.0.0.1:50051") as client:
        scores = client.score([ScoreItem("openai/gsm8k", "… #### 72", "72")], rubric)

Whatever the service refuses comes as the TandemError it raised; a service that cannot be reached as UnavailableError,
one that is late as DeadlineError.
"""

from tandem.services.clients.asynchronous import AsyncRewardClient, key_of
from tandem.services.clients.blocking import RewardClient
from tandem.services.clients.messages import Job, JobEvent, Scorers

__all__ = ["AsyncRewardClient", "Job", "JobEvent", "RewardClient", "Scorers", "key_of"]
