"""Clients of the reward service: `RewardClient`, and `AsyncRewardClient` for programs with an event loop.

What the service refuses is raised as the TandemError that the service raised. A service that cannot be reached is an
UnavailableError, a missed deadline a DeadlineError.
"""

from tandem.services.clients.asynchronous import AsyncRewardClient, job_key
from tandem.services.clients.blocking import RewardClient
from tandem.services.clients.messages import Job, JobEvent, Scorers

__all__ = ["AsyncRewardClient", "Job", "JobEvent", "RewardClient", "Scorers", "job_key"]
