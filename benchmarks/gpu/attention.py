"""Variable-length attention (rows packed end to end) against padded rows: the kernel and whole models against float32,
and the time of a batch of lognormal lengths.

B rows, N loss tokens, T tokens, heads H, head size D.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.part import (
    QWEN_1_5B,
    TINY,
    Outcome,
    device,
    lognormal_lengths,
    random_groups,
    relative_error,
    run_part,
    timed_rounds,
    write_model,
)
from tandem.protos.types import Packing
from tandem.trainer.batch.micro_batch import MicroBatch, TrainingRow, stack
from tandem.trainer.batch.packing import pack, pack_flat
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.token_model import token_logprobs
from tandem.trainer.models.varlen_attention import torch_varlen_attention, varlen_attention

MOST_TIMES_PADDED = 1.5
"""The error of packed rows may be this many times that of padded rows in the same dtype."""
SMALL_ERROR = 2e-3
"""Of bfloat16; an error below it passes in any case."""
HEADS = ((12, 2, 128, None), (14, 2, 64, None), (8, 8, 64, 200))
"""Query heads, key heads, head size, sliding window."""
BUDGET = 8192
PROMPT_TOKENS = 128


def main(outcome: Outcome, arguments: list[str]) -> None:
    """`SIZE`."""
    (size,) = arguments
    _compare_kernel(outcome)
    shape = QWEN_1_5B if size == "full" else TINY
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as name:
        folder = write_model(Path(name) / "model", dtype="float32", initializer_range=0.05, **shape)
        model: Any = load_model(folder, "bfloat16").to(device())
        chosen = varlen_attention(model, device(), torch.bfloat16)
        outcome.require(chosen is not None, "no variable-length attention was found for a bfloat16 model")
        if chosen is None:
            return
        padded = str(model.config._attn_implementation)
        outcome.lines.append(
            f"Variable-length attention of a bfloat16 Qwen2 model: `{chosen}`; padded rows: `{padded}`."
        )
        attention: dict[Packing, str] = {"padded": padded, "flat": chosen}
        rows = _rows(lognormal_lengths(8, median=250, longest=1200, seed=1), shape["vocab_size"], seed=1)
        outcome.lines.append(
            f"The model in bfloat16 against float32 with padded rows, {len(rows)} rows (the error is that of bfloat16; "
            "packing must not raise it):"
        )
        compare_packings(outcome, folder, model, rows, attention)
        _time_batches(outcome, model, attention, shape["vocab_size"])


def _compare_kernel(outcome: Outcome) -> None:
    rows = []
    for num_heads, num_shared, size, window in HEADS:
        lengths = lognormal_lengths(12, median=200, longest=900, seed=size)
        states = [
            torch.randn(1, heads, sum(lengths), size, device=device(), dtype=torch.bfloat16)
            for heads in (num_heads, num_shared, num_shared)
        ]
        slope = torch.randn(sum(lengths), num_heads, size, device=device(), dtype=torch.bfloat16)

        packed = partial(_packed_attention, lengths=lengths, window=window)
        alone = partial(_separate_attention, lengths=lengths, window=window)
        expected = _with_gradients(alone, [one.float() for one in states], slope.float())
        yardstick = _errors(_with_gradients(alone, states, slope), expected)
        errors = _errors(_with_gradients(packed, states, slope), expected)
        kind = f"{num_heads}/{num_shared} heads of {size}" + (f", window {window}" if window else "")
        _require_close(outcome, f"kernel, {kind}", errors, yardstick)
        rows += [[kind, "packed", *(f"{one:.1e}" for one in errors)]]
        rows += [[kind, "row by row", *(f"{one:.1e}" for one in yardstick)]]
    outcome.lines.append("The kernel in bfloat16 against float32, relative L2 errors over 12 rows of random states:")
    outcome.table(("query/key heads", "way", "output", "∂query", "∂key", "∂value"), rows)


def _packed_attention(query: Tensor, key: Tensor, value: Tensor, *, lengths: list[int], window: int | None) -> Tensor:
    """(1, H, T, D) of all rows → (T, H, D)."""
    ends = torch.tensor([0, *lengths], device=query.device).cumsum(0).to(torch.int32)
    module: Any = SimpleNamespace(is_causal=True)
    arguments: Any = {"sliding_window": window, "cu_seq_lens_q": ends, "max_length_q": max(lengths)}
    found, _ = torch_varlen_attention(module, query, key, value, None, **arguments)
    return found[0]


def _separate_attention(query: Tensor, key: Tensor, value: Tensor, *, lengths: list[int], window: int | None) -> Tensor:
    """The same, one row at a time."""
    parts = zip(*(one.split(lengths, 2) for one in (query, key, value)), strict=True)
    return torch.cat([_row_attention(*part, window)[0] for part in parts])


def _row_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """(1, H, T, D) of one row → (1, T, H, D)."""
    length = query.shape[2]
    positions = torch.arange(length, device=query.device)
    distance_TT = positions[:, None] - positions
    mask_TT = (distance_TT >= 0) & (distance_TT < (window or length))
    found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask_TT, enable_gqa=True)
    return found.transpose(1, 2)


def _with_gradients(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], states: Sequence[Tensor], slope: Tensor
) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in states]
    found = attend(*leaves)
    return [found.detach(), *torch.autograd.grad(found, leaves, slope)]


def _errors(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return [relative_error(one, other) for one, other in zip(found, expected, strict=True)]


def _require_close(outcome: Outcome, what: str, errors: Sequence[float], yardstick: Sequence[float]) -> None:
    limits = [max(MOST_TIMES_PADDED * one, SMALL_ERROR) for one in yardstick]
    close = all(error <= limit for error, limit in zip(errors, limits, strict=True))  # not for NaN
    outcome.require(close, f"{what}: errors {errors}, limits {limits}")


def _rows(lengths: Sequence[int], vocabulary: int, seed: int) -> list[TrainingRow]:
    groups = random_groups(
        lengths, num_samples=len(lengths), prompt_length=PROMPT_TOKENS, vocabulary=vocabulary, seed=seed
    )
    return [TrainingRow(row.trajectory.segments[0]) for group in groups for row in group.scored_rows]


def backward(model: Any, batch: MicroBatch) -> Tensor:
    """The log-probs (N,); gradients of their sum, weighted unevenly so that rows do not cancel."""
    logprobs_N = token_logprobs(model, batch)
    weights_N = torch.linspace(-1.0, 2.0, len(logprobs_N), device=device())
    (logprobs_N * weights_N).sum().backward()
    return logprobs_N.detach()


def _results(model: Any, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logprobs_N = backward(model, batch)
    return logprobs_N, {name: one.grad for name, one in model.named_parameters()}


def compare_packings(
    outcome: Outcome, folder: Path, model: Any, rows: list[TrainingRow], attention: dict[Packing, str]
) -> None:
    """Compares the log-probs and gradients of the bfloat16 model with those of the model in `folder` in float32. The
    last packing must not be further away than the first one.
    """
    reference: Any = load_model(folder, "float32").to(device())
    expected_N, expected = _results(reference, stack(rows, device()))
    expected = {name: one.cpu() for name, one in expected.items()}
    del reference
    lines, errors = [], []
    for packing, name in attention.items():
        model.set_attn_implementation(name)
        logprobs_N, gradients = _results(model, stack(rows, device(), packing=packing))
        joined = (torch.cat([one[name].flatten().cpu().float() for name in expected]) for one in (gradients, expected))
        errors.append([float((logprobs_N - expected_N).abs().mean()), relative_error(*joined)])
        largest = float((logprobs_N - expected_N).abs().max())
        lines.append([packing, f"{errors[-1][0]:.4f}", f"{largest:.3f}", f"{errors[-1][1]:.2e}"])
    _require_close(outcome, "model", errors[-1], errors[0])
    outcome.table(("packing", "mean log-prob error", "largest", "relative L2 error of all gradients"), lines)
    model.zero_grad()


def _time_batches(outcome: Outcome, model: Any, attention: dict[Packing, str], vocabulary: int) -> None:
    lines = []
    mixed = [6000, *lognormal_lengths(63, median=60, longest=1500, seed=3, sigma=1.0)]
    for kind, answers in (
        ("median 300", lognormal_lengths(64, median=300, longest=4096, seed=300)),
        ("median 1000", lognormal_lengths(64, median=1000, longest=7900, seed=1000)),
        ("one long, others median 60", mixed),
    ):
        rows = _rows(answers, vocabulary, seed=2)
        lengths = [len(row.segment.ids) for row in rows]
        bins = {"padded": pack(lengths, BUDGET), "flat": pack_flat(lengths, BUDGET)}
        batches = {
            packing: [stack([rows[row] for row in part], device(), packing=packing) for part in bins[packing]]
            for packing in attention
        }

        def train(packing: Packing, batches: dict[Packing, list[MicroBatch]] = batches) -> None:
            model.set_attn_implementation(attention[packing])
            for batch in batches[packing]:
                backward(model, batch)

        padded, flat = timed_rounds([lambda: train("padded"), lambda: train("flat")], repeats=3, warm_ups=1)
        ratio = statistics.median(one / other for one, other in zip(flat, padded, strict=True))
        computed = sum(batch.ids_BT.numel() for batch in batches["padded"])
        lines.append(
            [
                f"{kind}, longest {max(answers)}",
                f"{sum(lengths):,}",
                f"{1 - sum(lengths) / computed:.1%}",
                f"{len(bins['padded'])} / {len(bins['flat'])}",
                f"{statistics.median(padded):.2f}",
                f"{statistics.median(flat):.2f}",
                f"{ratio:.2f}",
            ]
        )
    outcome.lines.append(
        f"Forward and backward of 64 rows ({PROMPT_TOKENS} prompt tokens each, answers of lognormal lengths), planned "
        f"with {BUDGET} tokens a micro-batch; ratio: median of 3 rounds' ratios:"
    )
    outcome.table(
        (
            *("answers", "tokens", "padding", "micro-batches padded / flat"),
            *("padded s", "flat s", "flat / padded"),
        ),
        lines,
    )


if __name__ == "__main__":
    run_part(main)
