"""Off-policy correction as a whole: which tokens are trained, and what each weighs.

N loss tokens, flat, of B whole rows (see trainer/batch/ragged.py): of a micro-batch, or of the batch. A row is a
segment, or a trajectory whose segments stand one after another; its level `sequence` is then of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tandem.trainer.batch.ragged import row_sums, spread
from tandem.trainer.off_policy.options import CorrectionOptions
from tandem.trainer.off_policy.rejection import Verdict, judge
from tandem.trainer.off_policy.weights import bounded, normalized, ratios, weight_sums


@dataclass(frozen=True, slots=True)
class Corrected:
    """Weights and verdict of every token; all (N,), without gradient."""

    weights_N: Tensor
    """The behavior weight, of rejected tokens too; 0 in a row with a log-prob that is not finite."""
    keep_N: Tensor
    """bool: whether the token is trained. What is not leaves every flat tensor before the loss, and so the
    denominators: index with it, and take `ragged.keep_tokens(lengths_B, keep_N)` for the lengths.
    """
    log_ratio_N: Tensor
    """z, 0 in a row with a log-prob that is not finite."""
    finite_N: Tensor
    """bool: False on every token of a row with a log-prob that is not finite."""
    ratio_N: Tensor
    """The weight before its bounds."""
    bounded_N: Tensor
    """The weight before normalisation."""
    verdicts: Mapping[str, Verdict]
    """What each test found, by its name."""


def finite_rows(logprobs_N: Tensor, lengths_B: Tensor) -> Tensor:
    """bool (B,): rows without NaN or infinity, whose sum is finite therefore. An empty row is one."""
    return row_sums(logprobs_N, lengths_B).isfinite()


def correct(
    proximal_logprobs_N: Tensor,
    behavior_logprobs_N: Tensor,
    lengths_B: Tensor,
    options: CorrectionOptions,
    *,
    advantages_N: Tensor | None = None,
    counts_N: Tensor | None = None,
) -> Corrected:
    """Weighs and judges every token. All tests must pass (`options.tests`, the veto among them), each on the batch as
    it came.

    With `proximal = "bypassed"` the first argument is the current log-probs (see `proximal.proximal_logprobs`). Rows
    must be whole. Unless
    `options.needs_whole_batch`, a micro-batch alone gives what the batch would, number for number; with it, the batch's
    columns are to be
    given: tests look only at a token's own row, but the loss's denominators and the mean of normalised weights at all
        that is kept.
    `counts_N` is how often each token counts in that mean: 0 for a row that is not trained for another reason.

    A row with a NaN or infinite log-prob (a fault of the sampler's or the trainer's engine) is rejected whole, weighs
    0, and is counted (`nonfinite_row_fraction`): one bad answer must neither stop a run nor reach the weights. Rows
    that the sampler broke leave every denominator, for trainer/batch/columns.py looks for them first. One that only the
    trainer's engine breaks, in the pass that trains it, is known too late for that, and its gradient is not finite: the
    step is skipped. No tokens, or none that passes, is an ordinary outcome: every `keep_N` false, no NaN.
    """
    shape = proximal_logprobs_N.shape
    assert len(shape) == 1 and behavior_logprobs_N.shape == shape, (shape, behavior_logprobs_N.shape)
    assert lengths_B.ndim == 1 and not lengths_B.is_floating_point(), (lengths_B.shape, lengths_B.dtype)
    log_ratio_N = proximal_logprobs_N.detach() - behavior_logprobs_N.detach()
    # Both at once: two infinities of the same sign make a NaN, all else that is not finite stays so.
    finite_N = spread(finite_rows(log_ratio_N, lengths_B), lengths_B)
    broken_N = ~finite_N
    log_ratio_N.masked_fill_(broken_N, 0.0)

    verdicts = {name: judge(log_ratio_N, lengths_B, test, advantages_N) for name, test in options.tests.items()}
    keep_N = finite_N
    for verdict in verdicts.values():
        keep_N = keep_N & verdict.keep_N

    ratio_N = ratios(log_ratio_N, lengths_B, options.weights.level)
    weights_N = bounded_N = bounded(ratio_N, options.weights, advantages_N).masked_fill_(broken_N, 0.0)
    if options.weights.normalize:
        weights_N = normalized(bounded_N, weight_sums(bounded_N, keep_N, lengths_B, options.weights.level, counts_N))
    return Corrected(weights_N, keep_N, log_ratio_N, finite_N, ratio_N, bounded_N, verdicts)
