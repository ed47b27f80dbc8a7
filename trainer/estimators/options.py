"""Options of the advantage estimators. Imports no torch."""

from __future__ import annotations

from functools import cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tandem.protos.options import Options
from tandem.trainer.named_options import models_by_name

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

Need = Literal["values", "baselines", "components", "logprobs", "squared_probs", "columns", "turns"]
"""An optional column of `EstimatorBatch`."""


class EstimatorOptions(Options):
    """Base class of the options of an advantage estimator. A subclass gives `name` its value and names the function."""

    function: ClassVar[str]
    """`module:function` of the estimator, which takes an `EstimatorBatch` and these options and returns an `Estimate`.
    It is a string so that reading a recipe does not import torch.
    """
    needs: ClassVar[frozenset[Need]] = frozenset()
    """Optional columns that it reads. An estimator that reads components does not read the rewards."""
    compares_answers: ClassVar[bool] = True
    """Whether the answers to a prompt are compared with one another; if not, one answer is enough."""
    reads_places: ClassVar[bool] = False
    """Whether the result depends on the tokens at which a row's rewards fell."""
    weighs_tokens: ClassVar[bool] = False
    """Whether it reads the behavior weights of the off-policy correction."""

    name: str
    """Selects the estimator."""

    @property
    def min_group_size(self) -> int:
        """The fewest scored answers to a prompt that it accepts."""
        return 1


class GrpoOptions(EstimatorOptions):
    """GRPO (arXiv:2402.03300)."""

    function: ClassVar[str] = "tandem.trainer.estimators.group_relative:grpo"
    name: Literal["grpo"] = "grpo"
    std_over: Literal["group", "batch"] = "group"
    """The standard deviation to divide by: the group's, or that of all scores of the batch (Lite PPO,
    arXiv:2508.08221).
    """


class DrGrpoOptions(EstimatorOptions):
    """Dr.GRPO (arXiv:2503.20783): GRPO without the standard deviation. Nothing to set."""

    function: ClassVar[str] = "tandem.trainer.estimators.group_relative:dr_grpo"
    name: Literal["dr_grpo"] = "dr_grpo"


class GrpoPasskOptions(EstimatorOptions):
    """Only a group's best row is trained, weighted by its lead over the second (arXiv:2503.19595)."""

    function: ClassVar[str] = "tandem.trainer.estimators.group_relative:grpo_passk"
    name: Literal["grpo_passk"] = "grpo_passk"
    divide_by_std: bool = True
    """Divide by the group's standard deviation."""

    @property
    def min_group_size(self) -> int:
        return 2  # the best row and the second


class GpgOptions(EstimatorOptions):
    """GPG (arXiv:2504.02546)."""

    function: ClassVar[str] = "tandem.trainer.estimators.group_relative:gpg"
    name: Literal["gpg"] = "gpg"
    f_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Divides every advantage."""


class MaxrlOptions(EstimatorOptions):
    """MaxRL (arXiv:2602.02710): divides by the group's mean reward. Nothing to set."""

    function: ClassVar[str] = "tandem.trainer.estimators.group_relative:maxrl"
    name: Literal["maxrl"] = "maxrl"

    @property
    def min_group_size(self) -> int:
        return 2  # the advantage of a single answer is always 0


class RlooOptions(EstimatorOptions):
    """RLOO (arXiv:2402.14740)."""

    function: ClassVar[str] = "tandem.trainer.estimators.group_relative:rloo"
    name: Literal["rloo"] = "rloo"
    group_of_one: Literal["score", "zero"] = "score"
    """Advantage of the only row of a group: its score, as in REINFORCE without a baseline, or 0."""


class OpoOptions(EstimatorOptions):
    """OPO (arXiv:2505.23585): the baseline is the mean score weighted by length. Nothing to set."""

    function: ClassVar[str] = "tandem.trainer.estimators.group_relative:opo"
    name: Literal["opo"] = "opo"


class RemaxOptions(EstimatorOptions):
    """ReMax (arXiv:2310.10505): the greedy answer's score is the baseline. Nothing to set."""

    needs: ClassVar[frozenset[Need]] = frozenset({"baselines"})
    compares_answers: ClassVar[bool] = False
    reads_places: ClassVar[bool] = True
    function: ClassVar[str] = "tandem.trainer.estimators.reward_to_go:remax"
    name: Literal["remax"] = "remax"


class PkpoOptions(EstimatorOptions):
    """PKPO (arXiv:2505.15201) with its loo−1 baseline: maximises the best of k answers."""

    function: ClassVar[str] = "tandem.trainer.estimators.group_relative:pkpo"
    name: Literal["pkpo"] = "pkpo"
    k: Annotated[int, Field(ge=2)] = 4
    """The k of best of k; at most the size of a group."""

    @property
    def min_group_size(self) -> int:
        return self.k


class ReinforcePlusPlusOptions(EstimatorOptions):
    """REINFORCE++ (arXiv:2501.03262)."""

    compares_answers: ClassVar[bool] = False
    reads_places: ClassVar[bool] = True
    function: ClassVar[str] = "tandem.trainer.estimators.reward_to_go:reinforce_plus_plus"
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Fraction = 1.0
    """Discount per loss token."""
    whiten: bool = True
    """Bring the advantages of the batch's tokens to mean 0 and variance 1."""


class ReinforcePlusPlusBaselineOptions(EstimatorOptions):
    """REINFORCE++ with the group's mean as the baseline (arXiv:2501.03262)."""

    function: ClassVar[str] = "tandem.trainer.estimators.group_relative:reinforce_plus_plus_baseline"
    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    whiten: bool = True
    """Bring the advantages of the batch's tokens to mean 0 and variance 1."""


class GaeOptions(EstimatorOptions):
    """Generalised advantage estimation with a critic (arXiv:1506.02438)."""

    needs: ClassVar[frozenset[Need]] = frozenset({"values"})
    compares_answers: ClassVar[bool] = False
    reads_places: ClassVar[bool] = True
    function: ClassVar[str] = "tandem.trainer.estimators.reward_to_go:gae"
    name: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    """Discount per loss token."""
    lam: Fraction = 1.0
    """λ: 0 relies on the critic, 1 on the rewards."""
    critic_lam: Fraction | None = None
    """λ of the returns that the critic is fitted to; VC-PPO (arXiv:2503.01491) uses 1.0 with a smaller `lam`. None
    means `lam`.
    """
    whiten: bool = True
    """Bring the advantages of the batch's tokens to mean 0 and variance 1."""


class GdpoOptions(EstimatorOptions):
    """GDPO (arXiv:2601.05242): normalises every reward component separately."""

    needs: ClassVar[frozenset[Need]] = frozenset({"components"})
    function: ClassVar[str] = "tandem.trainer.estimators.group_relative:gdpo"
    name: Literal["gdpo"] = "gdpo"
    weights: tuple[float, ...] = ()
    """One weight per component, in alphabetical order of their names; empty means all 1."""
    divide_by_std: bool = True
    """Divide each component by the group's standard deviation."""
    whiten: bool = True
    """Bring the advantages of the batch's tokens to mean 0 and variance 1."""


class TurnGrpoOptions(EstimatorOptions):
    """GRPO of turns: the return from a turn on, compared with the group's at the same turn (arXiv:2511.14846,
    arXiv:2505.10978).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"turns"})
    reads_places: ClassVar[bool] = True
    function: ClassVar[str] = "tandem.trainer.estimators.turn_level:turn_grpo"
    name: Literal["turn_grpo"] = "turn_grpo"
    gamma: Fraction = 1.0
    """Discount per turn."""


class TurnGaeOptions(EstimatorOptions):
    """Generalised advantage estimation over turns, with a critic (arXiv:2512.17008, arXiv:2402.19446)."""

    needs: ClassVar[frozenset[Need]] = frozenset({"values", "turns"})
    compares_answers: ClassVar[bool] = False
    reads_places: ClassVar[bool] = True
    function: ClassVar[str] = "tandem.trainer.estimators.turn_level:turn_gae"
    name: Literal["turn_gae"] = "turn_gae"
    gamma: Fraction = 1.0
    """Discount per turn."""
    lam: Fraction = 1.0
    """λ: 0 relies on the critic, 1 on the rewards."""
    whiten: bool = True
    """Bring the advantages of the batch's tokens to mean 0 and variance 1."""


class OptimalTokenBaselineOptions(EstimatorOptions):
    """The optimal token baseline, comparing rows position by position (arXiv:2602.07078)."""

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs", "squared_probs", "columns"})
    reads_places: ClassVar[bool] = True
    weighs_tokens: ClassVar[bool] = True
    function: ClassVar[str] = "tandem.trainer.estimators.token_baseline:optimal_token_baseline"
    name: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    handle_zero_tail: bool = True
    """Use no baseline on the tail of a group's longest row, where the row would be its own baseline."""


class TirOptimalTokenBaselineOptions(EstimatorOptions):
    """The optimal token baseline for answers with tool calls: compares rows by the index among their loss tokens
    (arXiv:2602.07078).
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs", "squared_probs"})
    reads_places: ClassVar[bool] = True
    weighs_tokens: ClassVar[bool] = True
    function: ClassVar[str] = "tandem.trainer.estimators.token_baseline:tir_optimal_token_baseline"
    name: Literal["tir_optimal_token_baseline"] = "tir_optimal_token_baseline"
    handle_zero_tail: bool = True
    """Use no baseline on the tail of a group's longest row, where the row would be its own baseline."""


BUILT_IN = EstimatorOptions.__subclasses__()
"""The classes above; plug-ins that are loaded later are not among them."""

NAMES_ELSEWHERE = {
    "ppo": "gae",
    "dapo": "grpo",
    "lite_ppo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_no_std": "dr_grpo",
    "max_rl": "maxrl",
    "rloo_vectorized": "rloo",
    "leave_one_out": "rloo",
    "reinforce": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus",
    "reinforce_pp": "reinforce_plus_plus",
    "reinforce++_baseline": "reinforce_plus_plus_baseline",
    "vc_ppo": "gae",
    "turn_ppo": "turn_gae",
    "turn_level_gae": "turn_gae",
    "turn_wise_gae": "turn_gae",
    "otb": "optimal_token_baseline",
    "tir_otb": "tir_optimal_token_baseline",
}
"""Names of these estimators in other trainers and in the papers."""


@cache
def estimator_models() -> dict[str, type[EstimatorOptions]]:
    """name → options model of every estimator. Raises PluginError if an entry point of `tandem.advantages` cannot be
    used.
    """
    return models_by_name(BUILT_IN, "tandem.advantages", EstimatorOptions)
