"""What the parts of `benchmarks/gpu_proof.py` share: their outcome, timing, and models and rows with random contents.

B rows, H hidden size, T tokens.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.protos.types import (
    Prompt,
    SamplingParameters,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)

PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Dense bfloat16 operations a second by the datasheets of the SXM cards."""


@dataclass
class Outcome:
    """`lines` are Markdown for the record; a part with `failures` has failed."""

    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Adds a table, with an empty line around it."""
        cells = [head, ["---"] * len(head), *rows]
        self.lines += ["", *("| " + " | ".join(map(str, row)) + " |" for row in cells), ""]

    def require(self, holds: bool, what: str) -> None:
        """Records a failure unless it holds."""
        if not holds:
            self.failures.append(what)


def run_part(part: Callable[[Outcome, list[str]], None]) -> None:
    """The main program of a part: `python -m benchmarks.gpu.<module> RESULT ARGUMENT…`."""
    result, *arguments = sys.argv[1:]
    outcome = Outcome()
    part(outcome, arguments)
    Path(result).write_text(json.dumps(asdict(outcome)))


def device() -> torch.device:
    """The first GPU, or the CPU where parts run at tiny sizes."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_seconds(function: Callable[[], object], *, repeats: int = 10, warm_ups: int = 3) -> float:
    """The median of `repeats` calls, by events on a GPU."""
    return statistics.median(timed_rounds([function], repeats=repeats, warm_ups=warm_ups)[0])


def timed_rounds(
    functions: Sequence[Callable[[], object]], *, repeats: int = 10, warm_ups: int = 3
) -> list[list[float]]:
    """Seconds of each function in every round; a round calls each one once, so that ratios can be taken by round."""
    for _ in range(warm_ups):
        for function in functions:
            function()
    return [list(times) for times in zip(*([_seconds(one) for one in functions] for _ in range(repeats)), strict=True)]


def _seconds(function: Callable[[], object]) -> float:
    synchronize()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def matrix_rate() -> float:
    """Operations a second of one large matrix product in bfloat16 on random numbers."""
    size = 8192 if torch.cuda.is_available() else 256
    left, right = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: left @ right)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


def write_model(folder: Path, *, dtype: str, layers: int, hidden: int, **values: Any) -> Path:
    """Writes a Qwen2 model with random weights, without a tokenizer, made on the GPU if there is one."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        rope_theta=1e6,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype=dtype,
        **values,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with device():
            model = transformers.Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    return folder


QWEN_1_5B = {
    "layers": 28,
    "hidden": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
"""Qwen2.5-1.5B's architecture."""
TINY = {
    "layers": 2,
    "hidden": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}


def random_groups(
    lengths: Sequence[int], *, num_samples: int, prompt_length: int, vocabulary: int, seed: int
) -> list[TrajectoryGroup]:
    """Scored groups of random tokens; `lengths` are those of the answers, `num_samples` a group."""
    random = np.random.default_rng(seed)
    groups = []
    for index in range(len(lengths) // num_samples):
        sampling = SamplingParameters(temperature=1.0, max_tokens=max(lengths))
        prompt_ids = random.integers(3, vocabulary, prompt_length).astype(np.int32)
        rows = []
        for number, length in enumerate(lengths[index * num_samples : (index + 1) * num_samples]):
            ids = np.concatenate([prompt_ids, random.integers(3, vocabulary, length)]).astype(np.int32)
            sampled = np.arange(len(ids)) >= prompt_length
            logprobs = np.where(sampled, -np.log(vocabulary), 0.0).astype(np.float32)
            segment = Segment(ids, logprobs, sampled.astype(np.uint8), (VersionSpan(prompt_length, 1, 0),))
            trajectory = Trajectory(number, "policy", (segment,), "stop", "", sampling)
            rows.append(ScoredTrajectory(trajectory, float(number % 2), {}, None))
        groups.append(TrajectoryGroup(Prompt(0, index, prompt_ids, num_samples, sampling), tuple(rows)))
    return groups


def lognormal_lengths(count: int, *, median: float, longest: int, seed: int, sigma: float = 0.8) -> list[int]:
    """Lengths of answers."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return [int(one) for one in np.clip(drawn, 1, longest)]
