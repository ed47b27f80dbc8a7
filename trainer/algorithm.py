"""Configuration of the algorithm (estimator, loss, correction, KL, critic, selection) and checks that its parts fit
together. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from tandem.protos.options import Options
from tandem.trainer.estimators.options import NAMES_ELSEWHERE as ESTIMATORS_ELSEWHERE
from tandem.trainer.estimators.options import EstimatorOptions, GrpoOptions, estimator_models
from tandem.trainer.named_options import named, one_of
from tandem.trainer.off_policy.options import CorrectionOptions
from tandem.trainer.policy_losses.options import NAMES_ELSEWHERE as LOSSES_ELSEWHERE
from tandem.trainer.policy_losses.options import ClippedSurrogateOptions, LossOptions, loss_models

if TYPE_CHECKING:
    AnyEstimatorOptions = EstimatorOptions
    AnyLossOptions = LossOptions
else:
    AnyEstimatorOptions = one_of(estimator_models())
    AnyLossOptions = one_of(loss_models())


Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""Modes of aggregation (trainer/aggregation.py)."""

KlEstimator = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+"
]  # fmt: skip
"""`kl` is `k1`, `mse` is `k2`, `low_var_kl` is `k3`; `+` keeps the value and uses the gradient of k2 (trainer/kl.py).
"""


class KlPenalty(Options):
    """Coefficient of the KL penalty and its adaptation."""

    coefficient: Annotated[float, Field(ge=0.0)] = 0.001
    """β, the penalty per nat; with a target, its initial value."""
    target: Annotated[float, Field(gt=0.0)] | None = None
    """KL per token, in nats, that β is adapted to reach (arXiv:1909.08593); not set: β is constant."""
    horizon: Annotated[int, Field(ge=1)] = 10_000
    """Number of trajectories over which β adapts to the target."""


class RewardKl(KlPenalty):
    """KL in the reward of every token: r − β·k."""

    estimator: KlEstimator = "k1"
    """Only its value is used; k1 is the unbiased one."""


class LossKl(KlPenalty):
    """KL in the loss: + β·k of every token, under the loss's aggregation."""

    estimator: KlEstimator = "k3"
    """Its gradient is used. On-policy, the gradient of k2 and of every `+` is unbiased, that of k3 is biased (GRPO uses
    it), and that of k1 is noise around 0.
    """
    unbiased: bool = False
    """Multiply k by π_current/π_behavior, including its gradient, which makes the gradient unbiased for stale samples
    too (DeepSeek-V3.2); for k1 and k3.
    """

    @model_validator(mode="after")
    def _unbiased_estimators(self) -> LossKl:
        if self.unbiased and self.estimator not in ("k1", "kl", "k3", "low_var_kl"):
            raise ValueError(
                f"unbiased needs the estimator k1 or k3, not {self.estimator}: the others' expectation is not the KL"
            )
        return self


class KlOptions(Options):
    """The KL penalty towards the reference policy: in the reward, in the loss, in both, or nowhere (neither set)."""

    reward: RewardKl | None = None
    """Subtracted from every token's reward before the advantages."""
    loss: LossKl | None = None
    """Added to the policy loss."""


class OverlongPenalty(Options):
    """DAPO's soft penalty on answers close to the length limit (arXiv:2503.14476, eq. 13)."""

    buffer_tokens: Annotated[int, Field(ge=1)]
    """Number of tokens before the limit over which the penalty rises."""
    factor: Annotated[float, Field(ge=0.0)] = 1.0
    """The penalty at the limit."""
    beyond: Literal["flat", "ramp"] = "flat"
    """Past the limit the penalty stays at `factor` as in the paper (`flat`), or keeps rising (`ramp`)."""


class PolicyFiltration(Options):
    """PF-PPO: weights trajectories by the rank of their reward, because reward models err most on middle ranks
    (arXiv:2409.06957).
    """

    method: Literal["best_of_n", "best_random", "best_worst", "power"] = "best_worst"
    """Trains on the group's best; on its best and, with less weight, the others; on its best and worst; or in
    proportion to |reward|^power over the whole batch.
    """
    power: Annotated[float, Field(gt=0.0)] = 2.0
    """Exponent of `power`."""
    resample: bool = False
    """Draw as many trajectories as there are with these probabilities (as in the paper), instead of weighting by
    expected counts.
    """


class SelectionOptions(Options):
    """Selection and weighting of groups, rows and tokens."""

    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal when they are claimed, and return their credits (DAPO's dynamic
    sampling).
    """
    overlong_filter: bool = False
    """Exclude answers cut off at the limit from the loss; their rewards still count in their group's baseline (DAPO).
    """
    overlong_penalty: OverlongPenalty | None = None
    """Penalty on answers close to the length limit."""
    reward_clip: tuple[float, float] | None = None
    """Bounds that rewards are clipped to, before any penalty."""
    advantage_clip: Annotated[float, Field(gt=0.0)] | None = None
    """Largest absolute advantage of a token."""
    filtration: PolicyFiltration | None = None
    """Weights trajectories by the rank of their reward (PF-PPO)."""

    @model_validator(mode="after")
    def _ordered_clip(self) -> SelectionOptions:
        if self.reward_clip is not None and self.reward_clip[0] >= self.reward_clip[1]:
            raise ValueError(f"reward_clip is [lowest, highest], not {list(self.reward_clip)}")
        return self


class CriticConfig(Options):
    """PPO's value model and its training. Settings not listed here are the policy's: dtype, offload, weight decay, …"""

    path: str = ""
    """Folder or hub name of the value model, or of the language model to make it from; "" is the policy's."""
    learning_rate: Annotated[float, Field(ge=0.0)] = 1e-5
    """Learning rate of its AdamW optimizer."""
    value_clip: Annotated[float, Field(ge=0.0)] = 0.2
    """How far a value may move from its value at the batch's start before its gradient stops; 0 disables the clip."""
    warmup_batches: Annotated[int, Field(ge=0)] = 0
    """Number of first batches that train only the critic; the policy is published unchanged."""


class AlgorithmConfig(Options):
    """Configuration of the training algorithm."""

    advantage: Annotated[AnyEstimatorOptions, named("grpo", elsewhere=ESTIMATORS_ELSEWHERE)] = GrpoOptions()
    """The advantage estimator."""
    loss: Annotated[AnyLossOptions, named("clipped_surrogate", elsewhere=LOSSES_ELSEWHERE)] = ClippedSurrogateOptions()
    """The policy loss of a token."""
    aggregation: Aggregation = "token-mean"
    """How token losses are aggregated: over all tokens of the batch or over its trajectories. `-norm` divides a
    trajectory's sum by rollout.max_response_tokens (Dr.GRPO).
    """
    correction: Annotated[CorrectionOptions, named("token_clip", key="preset")] = CorrectionOptions()
    """Off-policy correction for samples of older versions and of another engine; a bare name selects a preset."""
    kl: KlOptions = KlOptions()
    """The KL penalty towards the reference policy, which is loaded only if there is a penalty."""
    entropy_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Coefficient of the entropy bonus, per nat and token; 0 disables it."""
    critic: CriticConfig = CriticConfig()
    """The value model; only the advantages `gae` and `turn_gae` use one."""
    selection: SelectionOptions = SelectionOptions()
    """Selection and weighting of groups, rows and tokens."""

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is trained."""
        return "values" in self.advantage.needs

    @property
    def needs_reference(self) -> bool:
        """Whether the policy that the run started from is kept as the reference policy."""
        return self.kl.reward is not None or self.kl.loss is not None

    @property
    def needs_baselines(self) -> bool:
        """Whether every prompt also gets a greedy answer."""
        return "baselines" in self.advantage.needs

    @property
    def needs_components(self) -> bool:
        """Whether rewards must include their breakdown."""
        return "components" in self.advantage.needs

    def check_sampling(self, *, samples_per_prompt: int, min_scored_samples: int, max_response_tokens: int) -> None:
        """Checks that groups are large enough for the estimator (`min_scored_samples` 0: all are scored), and that the
        overlong buffer fits into an answer. Raises ValueError that names the setting to change.
        """
        name, fewest_scored = self.advantage.name, self.advantage.min_group_size
        fewest = max(fewest_scored, 2 if self.advantage.compares_answers else 1)
        if samples_per_prompt < fewest:
            raise ValueError(
                f"trainer.advantage {name} compares {fewest} answers to a prompt or more: set "
                f"rollout.samples_per_prompt (now {samples_per_prompt}) to {fewest} at least, or take another advantage"
            )
        if 0 < min_scored_samples < fewest_scored:
            raise ValueError(
                f"trainer.advantage {name} compares {fewest_scored} answers to a prompt or more: set "
                f"reward.min_scored_samples (now {min_scored_samples}) to {fewest_scored} at least, or to 0 for all of "
                "them"
            )
        penalty = self.selection.overlong_penalty
        if penalty is not None and penalty.buffer_tokens > max_response_tokens:
            raise ValueError(
                f"trainer.selection.overlong_penalty.buffer_tokens ({penalty.buffer_tokens}) is above "
                f"rollout.max_response_tokens ({max_response_tokens}): lower it"
            )

    @model_validator(mode="after")
    def _parts_fit(self) -> AlgorithmConfig:
        if self.correction.needs_ratio_free_loss and self.loss.has_ratio:
            raise ValueError(
                f"correction {self.correction.preset} bypasses the proximal log-probs, so that its weights are "
                f"π_current/π_behavior; loss {self.loss.name} has that ratio in it, too: take loss reinforce, or "
                "another correction"
            )
        if not self.needs_critic and self.critic != CriticConfig():
            raise ValueError(
                f"critic is set, but advantage {self.advantage.name} has none: take advantage gae, or leave critic out"
            )
        if self.correction.proximal == "loglinear" and self.correction.needs_whole_batch:
            raise ValueError(
                "correction.proximal loglinear is known only in the pass that trains a token, and rejections, veto and "
                'weights.normalize judge the batch before it: leave them out, or set correction.proximal = "recomputed"'
            )
        if self.loss.counts_empty_rows and not self.aggregation.startswith("seq-"):
            raise ValueError(
                f"loss {self.loss.name}: count_empty_rows is about the number of trajectories, and aggregation "
                f"{self.aggregation} does not divide by it: take seq-mean-token-mean, or leave count_empty_rows out"
            )
        self._check_reward()
        return self

    def _check_reward(self) -> None:
        """Refuses settings on the total reward for an estimator that only reads its components and would ignore them,
        and those that make rewards negative for one that divides by their mean.
        """
        name, selection = self.advantage.name, self.selection
        effect = ""
        changes: dict[str, object] = {
            "kl.reward": self.kl.reward,
            "selection.overlong_penalty": selection.overlong_penalty,
        }
        if self.needs_components:
            effect = f"changes the reward, and advantage {name} reads its components only"
            changes["selection.reward_clip"] = selection.reward_clip
        elif name == "maxrl":
            effect = "makes rewards negative, and advantage maxrl divides by their mean as by a success rate"
        for key, value in changes.items():
            if effect and value is not None:
                raise ValueError(f"{key} {effect}: leave {key} out, or take another advantage")
        if self.needs_components and selection.drop_zero_variance:
            raise ValueError(
                f"selection.drop_zero_variance compares whole rewards, and advantage {name} their components, which "
                "may differ where the rewards are equal: leave selection.drop_zero_variance out, or take another "
                "advantage"
            )
