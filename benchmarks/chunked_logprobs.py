"""Measures peak memory of log-probs and their gradients, chunked and naive, each in its own process. Writes JSON.

    python benchmarks/chunked_logprobs.py [--tokens 4096] [--vocabulary 151936] [--hidden 256 896] [--output …]

The default hidden sizes are a small one, with which logits take nearly all memory, and that of Qwen2.5-0.5B.

Memory is the peak resident set during one forward and backward pass (getrusage's ru_maxrss) minus the resident set
before it, which includes inputs and libraries. It covers logits, softmax and all gradients, including the head's. The
naive way is the model's head followed by torch.nn.functional.cross_entropy. Uses one thread. The exit code is 1 if, at
any hidden size, chunks need more than a quarter of the naive memory or a log-prob differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.trainer.models.token_logprobs import token_statistics  # noqa: E402

WAYS = ("naive", "chunked", "chunked_with_entropy")
COPIES = 4
"""Copies of all logits that the naive way may hold at once. The benchmark refuses to run without memory for them."""
MAX_RATIO, MAX_ERROR = 0.25, 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 896])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "chunked_logprobs.json")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        _run(arguments)
        return 0
    needed = COPIES * 4 * arguments.tokens * arguments.vocabulary
    free = psutil.virtual_memory().available
    if free < needed:
        sys.exit(f"the naive way may need {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free: lower --tokens")
    rows = [_row(hidden, arguments) for hidden in arguments.hidden]
    worst = max(row["memory_ratio"] for row in rows)
    record = {
        "command": " ".join(["python benchmarks/chunked_logprobs.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "tokens": arguments.tokens,
        "vocabulary": arguments.vocabulary,
        "rows": rows,
        "memory_ratio": worst,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    largest = max(row["largest_differences"]["logprobs"] for row in rows)
    return int(worst > MAX_RATIO or largest > MAX_ERROR)


def _row(hidden: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures the three ways at one hidden size, and the differences between chunked and naive results."""
    with tempfile.TemporaryDirectory(prefix="tandem-logprobs-") as folder:
        found = {way: _measured(way, hidden, Path(folder), arguments) for way in WAYS}
        chunked, naive = (torch.load(Path(folder) / f"{way}.pt", weights_only=True) for way in ("chunked", "naive"))
    peaks = {way: found[way]["peak_bytes"] for way in WAYS}
    return {
        "hidden": hidden,
        "ways": found,
        "memory_ratio": round(peaks["chunked"] / peaks["naive"], 4),
        "memory_ratio_with_entropy": round(peaks["chunked_with_entropy"] / peaks["naive"], 4),
        "largest_differences": {name: float((chunked[name] - naive[name]).abs().max()) for name in naive},
    }


def _measured(way: str, hidden: int, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    shape = [f"--tokens={arguments.tokens}", f"--vocabulary={arguments.vocabulary}", f"--hidden={hidden}"]
    results = folder / f"{way}.pt"
    command = [sys.executable, __file__, *shape, "--way", way, "--results", str(results)]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def _run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (hidden,) = arguments.hidden
    hidden_NH = torch.randn(arguments.tokens, hidden, requires_grad=True)
    weight_VH = (torch.randn(arguments.vocabulary, hidden) / hidden**0.5).requires_grad_()
    target_N = torch.randint(arguments.vocabulary, (arguments.tokens,))
    temperature_N = 0.5 + torch.rand(arguments.tokens)
    before = psutil.Process().memory_info().rss
    began = time.monotonic()
    if arguments.way == "naive":
        logprobs_N = _naive(hidden_NH, weight_VH, target_N, temperature_N)
        loss = logprobs_N.sum()
    else:
        wanted = arguments.way == "chunked_with_entropy"
        found = token_statistics(hidden_NH, weight_VH, None, target_N, temperature_N, entropy=wanted)
        logprobs_N = found.logprobs_N
        loss = logprobs_N.sum() if found.entropy_N is None else logprobs_N.sum() + found.entropy_N.sum()
    loss.backward()
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    torch.save(
        {"logprobs": logprobs_N.detach(), "hidden_gradient": hidden_NH.grad, "weight_gradient": weight_VH.grad},
        arguments.results,
    )
    print(json.dumps({"peak_bytes": peak, "seconds": round(seconds, 2)}))


def _naive(hidden_NH: Tensor, weight_VH: Tensor, target_N: Tensor, temperature_N: Tensor) -> Tensor:
    logits_NV = functional.linear(hidden_NH, weight_VH).float() / temperature_N[:, None]
    return -functional.cross_entropy(logits_NV, target_N, reduction="none")


if __name__ == "__main__":
    sys.exit(main())
