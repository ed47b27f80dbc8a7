"""Attention over shared prompts (trainer/models/shared_attention.py) against rows of their own, padded or end to end: a
model's log-probs and gradients against float32, and the time of forward and backward.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.attention import backward, compare_packings
from benchmarks.gpu.part import (
    QWEN_1_5B,
    TINY,
    Outcome,
    device,
    random_groups,
    run_part,
    timed_rounds,
    write_model,
)
from tandem.protos.types import Packing
from tandem.trainer.batch.micro_batch import MicroBatch, TrainingRow, stack
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.shared_attention import SHARED_PROMPTS
from tandem.trainer.models.varlen_attention import varlen_attention

SHAPES = ((1024, 128), (256, 32), (512, 512))
"""Tokens of the prompt and of each of its 8 answers."""
ANSWERS = 8
TIMED_TOKENS = 16384
"""Of rows of their own, about: those of a micro-batch."""


def main(outcome: Outcome, arguments: list[str]) -> None:
    """`SIZE`."""
    shape = QWEN_1_5B if arguments[0] == "full" else TINY
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as name:
        folder = write_model(Path(name) / "model", dtype="float32", initializer_range=0.05, **shape)
        rows = _rows(200, 40, 2, shape["vocab_size"])
        model: Any = load_model(folder, "bfloat16").to(device())
        padded, flat = str(model.config._attn_implementation), varlen_attention(model, device(), torch.bfloat16)
        assert flat is not None
        attention: dict[Packing, str] = {"padded": padded, "flat": flat, "shared": SHARED_PROMPTS}
        outcome.lines.append("bfloat16 against float32 with padded rows, 2 prompts of 200 tokens, 8 answers of 40:")
        compare_packings(outcome, folder, model, rows, attention)
        _time(outcome, model, attention, shape["vocab_size"])


def _rows(prompt: int, answer: int, num_groups: int, vocabulary: int) -> list[TrainingRow]:
    groups = random_groups(
        [answer] * (ANSWERS * num_groups), num_samples=ANSWERS, prompt_length=prompt, vocabulary=vocabulary, seed=prompt
    )
    return [TrainingRow(row.trajectory.segments[0]) for group in groups for row in group.scored_rows]


def _time(outcome: Outcome, model: Any, attention: dict[Packing, str], vocabulary: int) -> None:
    lines = []
    for prompt, answer in SHAPES:
        num_prompts = max(1, round(TIMED_TOKENS / (ANSWERS * (prompt + answer))))
        rows = _rows(prompt, answer, num_prompts, vocabulary)
        batches = {packing: stack(rows, device(), packing=packing) for packing in attention}

        def train(packing: Packing, batches: dict[Packing, MicroBatch] = batches) -> None:
            model.set_attn_implementation(attention[packing])
            backward(model, batches[packing])

        rounds = timed_rounds([partial(train, packing) for packing in attention], repeats=5, warm_ups=2)
        seconds = dict(zip(attention, rounds, strict=True))
        tokens = {packing: batch.ids_BT.numel() for packing, batch in batches.items()}
        cells = f"{num_prompts} × ({prompt} + {ANSWERS} × {answer})", f"{tokens['shared'] / tokens['padded']:.2f}"
        medians = [f"{statistics.median(each):.3f}" for each in rounds]
        ratios = [f"{_ratio(seconds['shared'], seconds[other]):.2f}" for other in ("padded", "flat")]
        lines.append([*cells, *medians, *ratios])
    outcome.lines.append("Forward and backward of the rows of some prompts, medians of 5 rounds and of their ratios:")
    times = [f"{packing} s" for packing in attention]
    outcome.table(
        ("prompts × (prompt + answers)", "tokens shared / padded", *times, "shared / padded", "shared / flat"), lines
    )


def _ratio(seconds: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(seconds, others, strict=True))


if __name__ == "__main__":
    run_part(main)
