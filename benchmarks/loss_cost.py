"""Compares the forward and backward time of every policy loss on flat rows with that of a dense torch formula.

    python benchmarks/loss_cost.py [--repeats 15] [--sequences 4096] [--length 1024] [--output
    benchmarks/records/loss_cost.json]

Uses one thread and float32. Figures are the minimum processor time over the repeats. The process keeps freed memory,
since page faults would otherwise take more time than arithmetic. The dense formula is written by hand for a (sequences,
length) matrix without padding or masks and must give the same gradient. Ours is timed on rows of one length (`equal`)
and on rows of 1 to twice that length with the same number of tokens (`ragged`). Selections over the whole batch
(clip_cov, kl_cov, m2po) are timed separately as `select`. Fails if a ratio exceeds `LIMIT`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.trainer.aggregation import token_shares  # noqa: E402
from tandem.trainer.batch.ragged import spread  # noqa: E402
from tandem.trainer.policy_losses.inputs import LossTokens, policy_loss_sum  # noqa: E402
from tandem.trainer.policy_losses.options import loss_models  # noqa: E402
from tandem.trainer.policy_losses.registry import find_loss, policy_loss  # noqa: E402

LIMIT = 1.5
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_THRESHOLD_": "100000000000"}


@dataclass(frozen=True)
class Dense:
    """(B, T) each: c current, p proximal and b behavior log-probs, a advantages, w weights, chosen (bool)."""

    c: Tensor
    p: Tensor
    b: Tensor
    a: Tensor
    w: Tensor
    chosen: Tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    if not KEEP_MEMORY.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    torch.set_num_threads(1)
    equal_B = torch.full((arguments.sequences,), arguments.length, dtype=torch.int64)
    losses = {name: _measure(name, equal_B, arguments.repeats) for name in loss_models()}
    worst = max(figure for figures in losses.values() for name, figure in figures.items() if name.endswith("_ratio"))
    record = {
        "command": "python benchmarks/loss_cost.py " + " ".join(sys.argv[1:]),
        "sequences": arguments.sequences,
        "length": arguments.length,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "limit": LIMIT,
        "worst_ratio": worst,
        "losses": losses,
    }
    print(f"worst ratio {worst:.2f}, limit {LIMIT}")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if worst <= LIMIT else 1


def _measure(name: str, equal_B: Tensor, repeats: int) -> dict[str, float]:
    options = loss_models()[name]()
    tokens = _tokens(equal_B)
    choose = find_loss(name).select
    sides: dict[str, Callable[[], tuple[float, Tensor]]] = {}
    if choose is not None:
        tokens = replace(tokens, chosen_N=choose(tokens, options, seed=0))
        unchosen, unchosen_dense = replace(tokens, chosen_N=None), _dense(tokens, len(equal_B))
        sides["select_dense"] = lambda: _timed(lambda: SELECT[name](unchosen_dense))
        sides["select"] = lambda: _timed(lambda: choose(unchosen, options, seed=0))
        assert int(sides["select"]()[1].sum()) == int(sides["select_dense"]()[1].sum()), name
    ragged = replace(tokens, lengths_B=_ragged(equal_B))
    dense = _dense(tokens, len(equal_B))
    sides |= {
        "dense": lambda: _run_dense(DENSE[name], dense),
        "equal": lambda: _run_ours(tokens, options, _shares(tokens)),
        "ragged": lambda: _run_ours(ragged, options, _shares(ragged)),
    }
    torch.testing.assert_close(sides["equal"]()[1], sides["dense"]()[1].flatten(), rtol=1e-3, atol=1e-9)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, run in sides.items():
            seconds[side].append(run()[0])
    least = {side: min(each) for side, each in seconds.items()}
    ratios = {f"{side}_ratio": least[side] / least["dense"] for side in ("equal", "ragged")}
    if choose is not None:
        ratios["select_ratio"] = least["select"] / least["select_dense"]
    shown = (
        f"{side} {least[side]:.4f} s ({ratios[f'{side}_ratio']:.2f})"
        for side in ("equal", "ragged", "select")
        if side in least
    )
    print(f"{name:22s} dense {least['dense']:.4f} s   " + "   ".join(shown), flush=True)
    return {f"{side}_seconds": each for side, each in least.items()} | ratios


def _timed(function: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def _tokens(lengths_B: Tensor) -> LossTokens:
    generator = torch.Generator().manual_seed(0)
    count = int(lengths_B.sum())

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    behavior_N = -torch.rand(count, generator=generator)
    return LossTokens(
        current_logprobs_N=(behavior_N + 0.3 * normal(count)).clamp(max=-1e-4),
        proximal_logprobs_N=(behavior_N + 0.3 * normal(count)).clamp(max=-1e-4),
        behavior_logprobs_N=behavior_N,
        advantages_N=spread(normal(len(lengths_B)), lengths_B),
        behavior_weights_N=torch.rand(count, generator=generator) + 0.5,
        lengths_B=lengths_B,
    )


def _ragged(equal_B: Tensor) -> Tensor:
    """The same numbers of rows and tokens, with each pair of rows split at another place."""
    length = int(equal_B[0])
    first = torch.randint(1, 2 * length, (len(equal_B) // 2,), generator=torch.Generator().manual_seed(1))
    return torch.stack([first, 2 * length - first], 1).flatten()


def _dense(tokens: LossTokens, rows: int) -> Dense:
    columns = (
        tokens.current_logprobs_N,
        tokens.proximal_logprobs_N,
        tokens.behavior_logprobs_N,
        tokens.advantages_N,
        tokens.behavior_weights_N,
        torch.zeros_like(tokens.advantages_N, dtype=torch.bool) if tokens.chosen_N is None else tokens.chosen_N,
    )
    return Dense(*(values_N.view(rows, -1) for values_N in columns))


def _shares(tokens: LossTokens) -> Tensor:
    return spread(token_shares(tokens.lengths_B, "token-mean", length_constant=1.0).float(), tokens.lengths_B)


def _run_ours(tokens: LossTokens, options: object, shares_N: Tensor) -> tuple[float, Tensor]:
    leaf = tokens.current_logprobs_N.detach().requires_grad_()
    start = time.process_time()
    terms = policy_loss(replace(tokens, current_logprobs_N=leaf), options)  # type: ignore[arg-type]
    policy_loss_sum(terms, shares_N).backward()
    seconds = time.process_time() - start
    assert leaf.grad is not None
    return seconds, leaf.grad


def _run_dense(function: Callable[[Dense], Tensor], dense: Dense) -> tuple[float, Tensor]:
    leaf = dense.c.detach().requires_grad_()
    start = time.process_time()
    function(replace(dense, c=leaf)).mean().backward()
    seconds = time.process_time() - start
    assert leaf.grad is not None
    return seconds, leaf.grad


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20, 20).exp()


def _surrogate(ratio: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))


def _clipped_surrogate(x: Dense) -> Tensor:
    return torch.minimum(_surrogate(_ratio(x.c - x.p), x.a, 0.2, 0.2), 3.0 * x.a.abs()) * x.w


def _cispo(x: Dense) -> Tensor:
    return -_ratio(x.c.detach() - x.p).clamp(0.0, 1.28) * x.a * x.w * x.c


def _gspo(x: Dense) -> Tensor:
    mean = (x.c.detach() - x.p).mean(1, keepdim=True)
    return _surrogate((mean + x.c - x.c.detach()).clamp(max=10.0).exp(), x.a, 3e-4, 4e-4) * x.w


def _gmpo(x: Dense) -> Tensor:
    delta, sign = x.c - x.p, x.a.sign()
    exponent = sign * torch.minimum(sign * delta, sign * delta.clamp(-0.4, 0.4))
    ratio = (exponent.mean(1) + (x.w + 1e-10).log().mean(1)).exp()
    return (-x.a.mean(1) * ratio)[:, None].expand_as(x.a)


def _sapo(x: Dense) -> Tensor:
    tau = 1.05 - 0.05 * (x.a > 0)
    return -x.w * x.a * (4.0 / tau) * torch.sigmoid(tau * (_ratio(x.c - x.p) - 1.0))


def _reinforce(x: Dense) -> Tensor:
    return -x.a * x.w * x.c


def _dppo_tv(x: Dense) -> Tensor:
    rise = x.c.detach().exp() - x.p.exp()
    inside = ((x.a > 0) & (rise <= 0.15)) | ((x.a <= 0) & (rise >= -0.15))
    return -_ratio(x.c.detach() - x.p).clamp(max=20.0) * inside * x.a * x.w * x.c


def _dppo_kl(x: Dense) -> Tensor:
    c = x.c.detach()
    now, then = c.exp(), x.p.exp()
    divergence = then * (x.p - c) + (1 - then) * ((1 - then + 1e-8) / (1 - now + 1e-8)).log()
    near = divergence <= 0.05
    inside = ((x.a > 0) & (near | (now <= then))) | ((x.a <= 0) & (near | (now >= then)))
    return -_ratio(c - x.p).clamp(max=20.0) * inside * x.a * x.w * x.c


def _clip_cov(x: Dense) -> Tensor:
    return _surrogate((x.c - x.p).exp(), x.a, 0.2, 0.2) * ~x.chosen * x.w


def _kl_cov(x: Dense) -> Tensor:
    delta = x.c - x.p
    return (-x.a * delta.exp() + delta.abs() * x.chosen) * x.w


def _dro(x: Dense) -> Tensor:
    return (0.05 * (x.c - x.p).square() - x.a * x.c) * x.w


def _topr(x: Dense) -> Tensor:
    ratio = (x.c.detach() - x.b).sum(1, keepdim=True).clamp(max=0.0).exp()
    return -torch.where(x.a < 0, ratio, 1.0) * x.a * x.c


def _truncated_importance(x: Dense) -> Tensor:
    return -_ratio(x.c.detach() - x.b).clamp(max=4.0) * x.a * x.c


def _m2po(x: Dense) -> Tensor:
    return -_ratio(x.c - x.b) * x.a * ~x.chosen


def _chosen(x: Dense, places: Tensor) -> Tensor:
    chosen = torch.zeros(x.a.numel(), dtype=torch.bool)
    chosen[places] = True
    return chosen


def _covariance(x: Dense) -> Tensor:
    return (x.a - x.a.mean()) * (x.c - x.c.mean())


def _select_clip_cov(x: Dense) -> Tensor:
    covariance, ratio = _covariance(x), (x.c - x.p).exp()
    inside = -x.a * ratio.clamp(0.8, 1.2) <= -x.a * ratio
    places = (inside & (covariance > 1.0) & (covariance < 5.0)).flatten().nonzero()[:, 0]
    return _chosen(x, places[torch.randperm(len(places))[: max(1, int(2e-4 * x.a.numel()))]])


def _select_kl_cov(x: Dense) -> Tensor:
    return _chosen(x, _covariance(x).flatten().topk(max(1, int(2e-3 * x.a.numel()))).indices)


def _select_m2po(x: Dense) -> Tensor:
    log_ratio = (x.c - x.b).flatten()
    region, squares = log_ratio * x.a.flatten() > 0, log_ratio.square()
    ascending = squares[region].sort().values
    over = ascending[ascending.cumsum(0) / torch.arange(1, len(ascending) + 1) > 0.04]
    return region & (squares >= over[0]) if len(over) else torch.zeros_like(region)


SELECT: dict[str, Callable[[Dense], Tensor]] = {
    "clip_cov": _select_clip_cov,
    "kl_cov": _select_kl_cov,
    "m2po": _select_m2po,
}

DENSE: dict[str, Callable[[Dense], Tensor]] = {
    "clipped_surrogate": _clipped_surrogate,
    "cispo": _cispo,
    "gspo": _gspo,
    "gmpo": _gmpo,
    "sapo": _sapo,
    "reinforce": _reinforce,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "dro": _dro,
    "topr": _topr,
    "truncated_importance": _truncated_importance,
    "m2po": _m2po,
}


if __name__ == "__main__":
    sys.exit(main())
