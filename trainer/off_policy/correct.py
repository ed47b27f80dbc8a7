"""Off-policy correction: decides which tokens are trained and how much each one weighs.

All tensors hold the N loss tokens of B whole rows, flat (see trainer/batch/ragged.py), of a micro-batch or of the whole
batch. A row is one segment, or a trajectory whose segments are concatenated; level `sequence` then covers all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.trainer.batch.ragged import row_sums, spread
from tandem.trainer.off_policy.options import CorrectionOptions
from tandem.trainer.off_policy.rejection import Verdict, judge
from tandem.trainer.off_policy.weights import bounded, mean_weight, ratios


@dataclass(frozen=True, slots=True)
class Corrected:
    """Weights and test results of every token; all (N,), without gradient."""

    weights_N: Tensor
    """The behavior weight, also of rejected tokens; 0 in a row with a non-finite log-prob."""
    keep_N: Tensor
    """bool: whether the token is trained. The caller removes the other tokens from every flat tensor before the loss,
    and thereby from the denominators.
    """
    log_ratio_N: Tensor
    """z; 0 in a row with a non-finite log-prob."""
    finite_N: Tensor
    """bool: False on every token of a row with a non-finite log-prob."""
    ratio_N: Tensor
    """The weight before clamping to its bounds."""
    bounded_N: Tensor
    """The weight before normalisation."""
    verdicts: Mapping[str, Verdict]
    """Result of each test by the test's name."""


def finite_tokens(logprobs_N: Tensor, lengths_B: Tensor) -> Tensor:
    """bool (N,): False on every token of a row with a NaN or infinity."""
    return spread(row_sums(logprobs_N, lengths_B).isfinite(), lengths_B)


def correct(
    proximal_logprobs_N: Tensor,
    behavior_logprobs_N: Tensor,
    lengths_B: Tensor,
    options: CorrectionOptions,
    *,
    advantages_N: Tensor | None = None,
    counts_N: Tensor | None = None,
) -> Corrected:
    """Computes the weight of every token and applies every test. A token is kept only if it passes all of
    `options.tests`; each test sees the batch before any rejection.

    With `proximal = "bypassed"` the first argument is the current log-probs (see `proximal.proximal_logprobs`). Rows
    must be whole. A micro-batch gives exactly the same numbers as the whole batch unless `options.needs_whole_batch`;
    then pass the columns of the whole batch. `counts_N` is how often each token counts in the mean of normalised
    weights: 0 for a row that is excluded for another reason.

    A row with a NaN or infinite log-prob is rejected whole, gets weight 0, and is counted (`nonfinite_row_fraction`).
    Rows with non-finite sampler log-probs also leave every denominator, because trainer/batch/columns.py finds them
    first. If only the trainer's training pass produces the value, the denominators are already fixed; the gradient is
    then non-finite and the optimizer step is skipped. Empty inputs are valid.
    """
    shape = proximal_logprobs_N.shape
    assert len(shape) == 1 and behavior_logprobs_N.shape == shape, (shape, behavior_logprobs_N.shape)
    assert lengths_B.ndim == 1 and not lengths_B.is_floating_point(), (lengths_B.shape, lengths_B.dtype)
    log_ratio_N = proximal_logprobs_N.detach() - behavior_logprobs_N.detach()
    # One test covers both: inf − inf is NaN, and every other non-finite value stays non-finite.
    finite_N = finite_tokens(log_ratio_N, lengths_B)
    broken_N = ~finite_N
    log_ratio_N.masked_fill_(broken_N, 0.0)

    verdicts = {name: judge(log_ratio_N, lengths_B, test, advantages_N) for name, test in options.tests.items()}
    keep_N = finite_N
    for verdict in verdicts.values():
        keep_N = keep_N & verdict.keep_N

    ratio_N = ratios(log_ratio_N, lengths_B, options.weights.level)
    weights_N = bounded_N = bounded(ratio_N, options.weights, advantages_N).masked_fill_(broken_N, 0.0)
    if options.weights.normalize:
        mean = mean_weight(bounded_N, keep_N, lengths_B, options.weights.level, counts_N)
        weights_N = (bounded_N / torch.where(mean > 0, mean, 1.0)).to(bounded_N.dtype)
    return Corrected(weights_N, keep_N, log_ratio_N, finite_N, ratio_N, bounded_N, verdicts)
