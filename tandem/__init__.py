"""Tandem: asynchronous reinforcement learning for language models.

    from tandem import RewardClient, ScoreItem

    with RewardClient("127.0.0.1:50051") as client:
        scores = client.score([ScoreItem("openai/gsm8k", "... #### 72", "72")])

This package has what other programs import: the reward service's clients, and the contracts of plug-ins. A name is
imported when it is first used, so `import tandem` loads nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.protos.contracts import (
        Agent,
        Environment,
        Observation,
        Score,
        Scored,
        ScoreItem,
        SnapshotEnvironment,
        StepResult,
        Unscored,
        parallel_tool,
        tool_effect,
    )
    from tandem.protos.errors import TandemError, UserError
    from tandem.reward.contracts import Scorer
    from tandem.services.clients import AsyncRewardClient, RewardClient
    from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
    from tandem.trainer.estimators.options import EstimatorOptions
    from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
    from tandem.trainer.policy_losses.options import LossOptions

__all__ = [
    "Agent",
    "AsyncRewardClient",
    "Environment",
    "Estimate",
    "EstimatorBatch",
    "EstimatorOptions",
    "LossOptions",
    "LossTerms",
    "LossTokens",
    "Observation",
    "RewardClient",
    "Score",
    "ScoreItem",
    "Scored",
    "Scorer",
    "SnapshotEnvironment",
    "StepResult",
    "TandemError",
    "Unscored",
    "UserError",
    "parallel_tool",
    "tool_effect",
]

_MODULES = {
    "protos.contracts": (
        "Agent Environment Observation Score ScoreItem Scored SnapshotEnvironment StepResult Unscored "
        "parallel_tool tool_effect"
    ),
    "protos.errors": "TandemError UserError",
    "reward.contracts": "Scorer",
    "services.clients": "AsyncRewardClient RewardClient",
    "trainer.estimators.inputs": "Estimate EstimatorBatch",
    "trainer.estimators.options": "EstimatorOptions",
    "trainer.policy_losses.inputs": "LossTerms LossTokens",
    "trainer.policy_losses.options": "LossOptions",
}
_MODULE_OF = {name: f"tandem.{module}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
