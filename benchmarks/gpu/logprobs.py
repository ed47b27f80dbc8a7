"""Log-probs by chunks of the output head (trainer/models/token_logprobs.py) against all logits at once: results, peak
memory, time.

N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.part import Outcome, device, median_seconds, relative_error, run_part
from tandem.trainer.models.token_logprobs import statistics_from_logits, token_statistics

MOST_ERROR = 2e-2
"""Relative L2 error of the gradients in bfloat16."""
MOST_MEMORY = 0.5
"""Of the peak of all logits at once."""


def main(outcome: Outcome, arguments: list[str]) -> None:
    """`SIZE`."""
    is_full = arguments[0] == "full"
    num_tokens, hidden, vocabulary = (8192, 1536, 151936) if is_full else (64, 32, 512)
    hidden_NH = torch.randn(num_tokens, hidden, device=device(), dtype=torch.bfloat16)
    weight_VH = torch.randn(vocabulary, hidden, device=device(), dtype=torch.bfloat16) / hidden**0.5
    target_N = torch.randint(vocabulary, (num_tokens,), device=device())
    temperature_N = torch.ones(num_tokens, device=device())
    leaves = [one.requires_grad_() for one in (hidden_NH, weight_VH)]

    def chunked() -> list[Tensor]:
        logprobs_N = token_statistics(hidden_NH, weight_VH, None, target_N, temperature_N).logprobs_N
        return [logprobs_N.detach(), *torch.autograd.grad(logprobs_N.sum(), leaves)]

    def at_once() -> list[Tensor]:
        logprobs_N = statistics_from_logits(hidden_NH @ weight_VH.T, target_N, temperature_N).logprobs_N
        return [logprobs_N.detach(), *torch.autograd.grad(logprobs_N.sum(), leaves)]

    rows, found, peaks = [], [], []
    for name, way in (("chunks", chunked), ("all logits at once", at_once)):
        results, peak = _peak(way)
        found.append(results)
        peaks.append(peak)
        rows.append([name, f"{median_seconds(way, repeats=3, warm_ups=1):.3f}", f"{peak / 2**30:.1f}"])
    errors = [relative_error(one, other) for one, other in zip(*found, strict=True)]
    outcome.require(max(errors) <= MOST_ERROR, f"errors {errors}, limit {MOST_ERROR}")
    if is_full:
        outcome.require(peaks[0] <= MOST_MEMORY * peaks[1], f"chunks take {peaks[0]} bytes, all logits {peaks[1]}")
    outcome.lines.append(
        f"{num_tokens} tokens, hidden size {hidden}, vocabulary {vocabulary:,}, bfloat16, forward and backward. "
        f"Relative differences of log-probs, ∂hidden, ∂weight: {', '.join(f'{one:.1e}' for one in errors)}."
    )
    outcome.table(("way", "seconds", "peak GiB beyond the inputs"), rows)


def _peak(way: Any) -> tuple[list[Tensor], int]:
    """The results and the most memory beyond what was allocated before; 0 on a CPU."""
    if not torch.cuda.is_available():
        return way(), 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return way(), torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    run_part(main)
