"""The objective of a batch's optimizer steps: off-policy correction, denominators, policy loss, KL, entropy, value
loss.

`policy_loss` and `value_loss` compute one micro-batch at a time; their results sum to the loss of the optimizer step,
however it was split. No model is used here.

R trajectories, N loss tokens of the batch (order: trainer/batch/layout.py), M those of a micro-batch, K those of a
micro-batch that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from tandem.trainer.aggregation import token_shares
from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.batch.columns import BatchColumns
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.metrics import BatchSums
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.batch.ragged import keep_tokens
from tandem.trainer.batch.rewards import Targets
from tandem.trainer.kl import KlCoefficients, kl_loss
from tandem.trainer.models.critic import clipped_value_loss
from tandem.trainer.models.token_logprobs import TokenStatistics
from tandem.trainer.off_policy.correct import Corrected, correct
from tandem.trainer.off_policy.diagnostics import correction_sums
from tandem.trainer.off_policy.proximal import proximal_logprobs
from tandem.trainer.policy_losses.inputs import LossTokens, policy_loss_sum
from tandem.trainer.policy_losses.registry import find_loss, policy_loss

_Part = Callable[[Tensor], Tensor]
"""Takes some tokens' values out of a column of the batch."""


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Columns of one optimizer step, (N,) on the CPU; only the values at the step's own tokens are defined."""

    number: int
    """The number of the planned step."""
    taken: int
    """The number of the batch's optimizer steps before this one."""
    shares_N: Tensor
    keep_N: Tensor
    """bool: whether the token is trained, as far as this is decided on the whole batch."""
    weights_N: Tensor | None
    """Behavior weights; None if each micro-batch is corrected separately."""
    chosen_N: Tensor | None
    """bool: tokens chosen by the loss's selection; None if the loss has none."""


@dataclass
class BatchObjective:
    """The objective of one batch, the same on every rank. `sums` accumulates its metrics."""

    config: AlgorithmConfig
    layout: BatchLayout
    start: BatchColumns
    targets: Targets
    _: KW_ONLY
    policy_version: int
    num_steps: int
    """Optimizer steps of an epoch."""
    num_epochs: int
    coefficients: KlCoefficients
    max_response_tokens: int
    seed: int
    device: torch.device
    counts_whole_batch: bool
    """Whether this rank adds the metrics of corrections over the whole batch; set it on exactly one rank."""

    def __post_init__(self) -> None:
        self.sums = BatchSums(self.config.correction, self.device)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return self.num_steps * self.num_epochs

    def begin_step(self, taken: int, current_N: Tensor | None) -> StepColumns:
        """The columns shared by the micro-batches of the step after `taken` optimizer steps on this batch; `current_N`
        if `needs_every_step`.
        """
        layout, correction = self.layout, self.config.correction
        step = taken % self.num_steps
        places, lengths_S = layout.tokens_of(step)
        keep_N = torch.ones(layout.num_tokens, dtype=torch.bool)
        weights_N = None
        if correction.needs_whole_batch:
            corrected = self._correct_step(places, lengths_S, current_N)
            keep_N[places] = corrected.keep_N
            weights_N = torch.ones(layout.num_tokens)
            weights_N[places] = corrected.weights_N.float()
        keep_N &= (self.targets.counts_R > 0).repeat_interleave(layout.lengths_R)
        if self.start.finite_N is not None:
            keep_N &= self.start.finite_N
        chosen_N = self._choose(step, taken, keep_N, weights_N, current_N)
        return StepColumns(step, taken, self._shares(step, keep_N) * keep_N, keep_N, weights_N, chosen_N)

    def policy_loss(self, plan: StepColumns, number: int, batch: MicroBatch, outputs: TokenStatistics) -> Tensor:
        """The part of micro-batch `number` in the step's loss; gradient flows through `outputs`."""
        part = self._part_of(plan, number)
        tokens, keep_M = self._loss_tokens(plan, part, batch, outputs.logprobs_N)
        everything = bool(keep_M.all())  # usually true; then nothing is copied

        def kept(values_M: Tensor) -> Tensor:
            return values_M if everything else values_M[keep_M]

        tokens = tokens if everything else tokens.kept(keep_M)
        terms = policy_loss(tokens, self.config.loss)
        losses_K, marks = terms.losses_N, dict(terms.marks)
        if self.config.kl.loss is not None:
            assert self.start.reference_N is not None, "KL needs the reference policy"
            reference_K = kept(part(self.start.reference_N))
            ratio_K = tokens.importance_ratio_N
            if self.config.correction.proximal != "bypassed":  # otherwise it already is π_current/π_behavior
                ratio_K = ratio_K * tokens.behavior_weights_N
            penalty_K = kl_loss(tokens.current_logprobs_N, reference_K, self.config.kl.loss, ratio_N=ratio_K)
            losses_K = losses_K + self.coefficients.loss * penalty_K
            marks["reference_kl"] = penalty_K.detach()
        if outputs.entropy_N is not None:
            entropy_K = kept(outputs.entropy_N)
            losses_K = losses_K - self.config.entropy_coefficient * entropy_K
            marks["entropy"] = entropy_K.detach()
        else:  # a free estimate: the tokens were sampled from (nearly) this policy
            marks["entropy"] = -tokens.current_logprobs_N.detach()
        shares_K = kept(part(plan.shares_N).float())
        loss = policy_loss_sum(replace(terms, losses_N=losses_K), shares_K)
        _break_gradient(loss, outputs.logprobs_N)
        self.sums.add_marks(loss, marks, losses_K.numel())
        return loss

    def _part_of(self, plan: StepColumns, number: int) -> _Part:
        """Takes a micro-batch's part of a column, on the device."""
        place = self.layout.place_of(plan.number, number)
        return lambda column_N: column_N[place].to(self.device)

    def _loss_tokens(
        self, plan: StepColumns, part: _Part, batch: MicroBatch, current_M: Tensor
    ) -> tuple[LossTokens, Tensor]:
        """(the micro-batch's tokens, mask of the kept ones). Corrects them unless the whole batch was corrected."""
        correction, behavior_M = self.config.correction, batch.behavior_logprobs_N
        tokens, numerator_M = self._unweighted(
            plan.taken, part, current_M, behavior_M, batch.versions_N, batch.lengths_B
        )
        keep_M = part(plan.keep_N)
        if plan.weights_N is None:
            arguments = numerator_M, behavior_M, batch.lengths_B
            corrected = correct(*arguments, correction, advantages_N=tokens.advantages_N)
            staleness_M = self.policy_version - 1 - batch.versions_N
            self.sums.add_correction(correction_sums(corrected, *arguments, staleness_M, correction))
            weights_M, keep_M = corrected.weights_N, keep_M & corrected.keep_N
        else:
            weights_M = part(plan.weights_N)
        chosen_M = None if plan.chosen_N is None else part(plan.chosen_N)
        return replace(tokens, behavior_weights_N=weights_M, chosen_N=chosen_M), keep_M

    def _unweighted(
        self, taken: int, part: _Part, current_N: Tensor, behavior_N: Tensor, versions_N: Tensor, lengths_B: Tensor
    ) -> tuple[LossTokens, Tensor]:
        """(some tokens of the batch with behavior weights of 1, their proximal log-probs for `correct`)."""
        proximal_N, numerator_N = proximal_logprobs(
            self.config.correction.proximal,
            current_logprobs_N=current_N,
            behavior_logprobs_N=behavior_N,
            recomputed_N=None if self.start.proximal_N is None else part(self.start.proximal_N),
            versions_N=versions_N,
            batch_version=self.policy_version,
            progress=taken / self.total_steps,
        )
        columns = current_N, proximal_N, behavior_N, part(self.targets.advantages_N)
        return LossTokens(*columns, torch.ones_like(behavior_N), lengths_B), numerator_N

    def value_loss(self, plan: StepColumns, number: int, values_M: Tensor) -> Tensor:
        """The part of micro-batch `number` in the critic's loss; gradient flows through `values_M`."""
        assert self.targets.returns_N is not None and self.start.values_N is not None, "a critic comes with returns"
        part = self._part_of(plan, number)
        returns_M, before_M = part(self.targets.returns_N).float(), part(self.start.values_N)
        terms = clipped_value_loss(values_M, returns_M, before_M, clip=self.config.critic.value_clip or math.inf)
        loss = policy_loss_sum(terms, part(plan.shares_N).float())
        _break_gradient(loss, values_M)
        self.sums.add_value(loss, terms.marks["clipped"])
        return loss

    def _correct_step(self, places: Tensor, lengths_S: Tensor, current_N: Tensor | None) -> Corrected:
        """Corrects all tokens of the step at once, on every rank."""
        correction, start = self.config.correction, self.start
        numerator_N = current_N if correction.proximal == "bypassed" else start.proximal_N
        assert numerator_N is not None and start.behavior_N is not None and start.versions_N is not None
        arguments = numerator_N[places], start.behavior_N[places], lengths_S
        counts_N = self.targets.counts_R.repeat_interleave(self.layout.lengths_R)
        corrected = correct(
            *arguments, correction, advantages_N=self.targets.advantages_N[places], counts_N=counts_N[places]
        )
        if self.counts_whole_batch:
            staleness = self.policy_version - 1 - start.versions_N[places]
            self.sums.add_correction(correction_sums(corrected, *arguments, staleness, correction))
        return corrected

    def _choose(
        self, step: int, taken: int, keep_N: Tensor, weights_N: Tensor | None, current_N: Tensor | None
    ) -> Tensor | None:
        """Applies the loss's selection to the step's kept tokens."""
        select = find_loss(self.config.loss.name).select
        if select is None:
            return None
        start = self.start
        assert current_N is not None and start.behavior_N is not None and start.versions_N is not None
        places, lengths_S = self.layout.tokens_of(step)
        kept_S = keep_tokens(lengths_S, keep_N[places])
        places = places[keep_N[places]]

        def part(column_N: Tensor) -> Tensor:
            return column_N[places]

        columns = part(current_N), part(start.behavior_N), part(start.versions_N)
        tokens, _ = self._unweighted(taken, part, *columns, kept_S)
        if weights_N is not None:
            tokens = replace(tokens, behavior_weights_N=part(weights_N))
        chosen_N = torch.zeros(self.layout.num_tokens, dtype=torch.bool)
        chosen_N[places] = select(tokens, self.config.loss, seed=self.seed + taken)
        return chosen_N

    def _shares(self, step: int, keep_N: Tensor) -> Tensor:
        """Each token's share of the step's loss. Denominators cover all kept tokens and trajectories of the step."""
        layout, counts_R = self.layout, self.targets.counts_R
        here_R = layout.steps_R == step
        kept_R = torch.where(here_R, keep_tokens(layout.lengths_R, keep_N), 0)
        num_rows = float(torch.where(here_R, counts_R, 0.0).sum())
        shares_R = token_shares(
            kept_R,
            self.config.aggregation,
            length_constant=self.max_response_tokens,
            num_sequences=num_rows if self.config.loss.counts_empty_rows else None,
            multiplicities=counts_R,
        )
        return shares_R.repeat_interleave(layout.lengths_R)


def _break_gradient(loss: Tensor, outputs_M: Tensor) -> None:
    """Makes the gradient NaN if the loss is not finite, so that the optimizer step is skipped. A clamp, or k1, would
    otherwise give a finite gradient for a NaN.

    `outputs_M` are the model's outputs. A finite loss leaves the gradient bitwise unchanged.
    """
    broken = ~loss.detach().isfinite()
    if outputs_M.requires_grad:
        outputs_M.register_hook(lambda gradient_M: gradient_M.masked_fill(broken, math.nan))
