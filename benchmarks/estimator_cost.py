"""Compares each advantage estimator's time with that of a hand-vectorised dense torch expression, on one thread.

    python benchmarks/estimator_cost.py [--repeats 9] [--output benchmarks/records/estimator_cost.json]

`equal`: 4,096 rows of 1,024 tokens, without a mask in the dense expression. `ragged`: lognormal lengths of at most
1,024, which the dense expression pads and masks. Turns have 64 tokens. Ours passes flat columns through `estimate`,
including all checks. The benchmark fails if the results differ. Figures are medians over alternating repeats. The ratio
on `equal` must be at most 1.5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.trainer.estimators.inputs import EstimatorBatch  # noqa: E402
from tandem.trainer.estimators.options import estimator_models  # noqa: E402
from tandem.trainer.estimators.registry import estimate  # noqa: E402

ROWS, LONGEST, GROUP, TURN = 4096, 1024, 8, 64
LIMIT = 1.5
GAMMA, LAM = 0.99, 0.95


@dataclass(frozen=True)
class Dense:
    """The padded columns of a batch. `mask_RT` is None if no row is padded."""

    rewards_RT: Tensor
    values_RT: Tensor
    logprobs_RT: Tensor
    squared_RT: Tensor
    weights_RT: Tensor
    baselines_R: Tensor
    components_RC: Tensor
    group_R: Tensor
    turns_RT: Tensor
    mask_RT: Tensor | None

    @property
    def scores_R(self) -> Tensor:
        return self.rewards_RT.sum(1)

    def group_sums(self, values: Tensor) -> Tensor:
        return values.new_zeros(ROWS // GROUP, *values.shape[1:]).index_add_(0, self.group_R, values)

    def centred(self, values_R: Tensor) -> Tensor:
        return values_R - (self.group_sums(values_R) / GROUP)[self.group_R]

    def std(self, centred_R: Tensor) -> Tensor:
        return (self.group_sums(centred_R.square()) / (GROUP - 1)).sqrt()[self.group_R]

    def on_tokens(self, values_R: Tensor) -> Tensor:
        if self.mask_RT is None:
            return values_R[:, None].expand(-1, LONGEST).contiguous()
        return values_R[:, None] * self.mask_RT

    def masked(self, values_RT: Tensor) -> Tensor:
        return values_RT if self.mask_RT is None else values_RT * self.mask_RT

    def discounted(self, values_RT: Tensor, decay: float) -> Tensor:
        # The fastest hand-written form we found: transpose, then loop in place.
        sums_TR = values_RT.t().contiguous()
        for column in range(LONGEST - 2, -1, -1):
            sums_TR[column].add_(sums_TR[column + 1], alpha=decay)
        return sums_TR.t().contiguous()

    def to_go(self) -> Tensor:
        return self.rewards_RT.flip(1).cumsum(1).flip(1)

    def turn_sums(self, values_RT: Tensor) -> Tensor:
        sums_RK = values_RT.new_zeros(ROWS, int(self.turns_RT.max()) + 1)
        return sums_RK.scatter_add_(1, self.turns_RT, self.masked(values_RT))

    def on_turns(self, values_RK: Tensor) -> Tensor:
        return self.masked(values_RK.gather(1, self.turns_RT))

    def whiten(self, values_RT: Tensor) -> Tensor:
        if self.mask_RT is None:
            variance, mean = torch.var_mean(values_RT)
            return (values_RT - mean) * torch.rsqrt(variance + 1e-8)
        count = self.mask_RT.sum()
        centred_RT = (values_RT - (values_RT * self.mask_RT).sum() / count) * self.mask_RT
        return centred_RT * torch.rsqrt(centred_RT.square().sum() / (count - 1) + 1e-8)


def dense_grpo(d: Dense) -> Tensor:
    centred_R = d.centred(d.scores_R)
    return d.on_tokens(centred_R / (d.std(centred_R) + 1e-6))


def dense_passk(d: Dense) -> Tensor:
    scores_R = d.scores_R
    by_group_PG = scores_R[torch.argsort(d.group_R, stable=True)].view(-1, GROUP)
    two_P2, which_P2 = by_group_PG.topk(2, 1)
    lead_PG = torch.zeros_like(by_group_PG).scatter_(1, which_P2[:, :1], two_P2[:, :1] - two_P2[:, 1:])
    lead_R = torch.empty_like(scores_R)
    lead_R[torch.argsort(d.group_R, stable=True)] = lead_PG.view(-1)
    return d.on_tokens(lead_R / (d.std(d.centred(scores_R)) + 1e-6))


def dense_gpg(d: Dense) -> Tensor:
    scores_R = d.scores_R
    return d.on_tokens(d.centred(scores_R) * (ROWS / (scores_R != 0).sum().clamp(min=1)))


def dense_maxrl(d: Dense) -> Tensor:
    scores_R = d.scores_R
    means_R = (d.group_sums(scores_R) / GROUP)[d.group_R]
    return d.on_tokens(torch.where(means_R > 0, (scores_R - means_R) / means_R, 0.0))


def dense_opo(d: Dense) -> Tensor:
    scores_R = d.scores_R
    lengths_R = torch.full_like(scores_R, LONGEST) if d.mask_RT is None else d.mask_RT.sum(1)
    baselines_P = d.group_sums(lengths_R * scores_R) / d.group_sums(lengths_R)
    return d.on_tokens(scores_R - baselines_P[d.group_R])


def dense_pkpo(d: Dense) -> Tensor:
    scores_R = d.scores_R
    order_R = torch.argsort(d.group_R, stable=True)
    sorted_PG, which_PG = scores_R[order_R].view(-1, GROUP).sort(1)
    below_G = torch.arange(GROUP, dtype=torch.float64)
    share_G = below_G * (below_G - 1) * (below_G - 2) / ((GROUP - 1) * (GROUP - 2) * (GROUP - 3))
    gains_PG = (sorted_PG.diff(dim=1, prepend=sorted_PG[:, :1]) * share_G).cumsum(1) * 4
    gains_R = torch.empty_like(scores_R)
    gains_R[order_R] = torch.empty_like(gains_PG).scatter_(1, which_PG, gains_PG).view(-1)
    return d.on_tokens(gains_R)


def dense_gae(d: Dense) -> Tensor:
    next_RT = torch.cat([d.values_RT[:, 1:], d.values_RT.new_zeros(ROWS, 1)], 1)
    advantages_RT = d.discounted(d.masked(d.rewards_RT + GAMMA * next_RT - d.values_RT), GAMMA * LAM)
    _ = advantages_RT + d.values_RT  # ours also computes the critic's returns
    return d.whiten(advantages_RT)


def dense_gdpo(d: Dense) -> Tensor:
    total_R = torch.zeros(ROWS, dtype=torch.float64)
    for component_R in d.components_RC.unbind(1):
        centred_R = d.centred(component_R)
        total_R = total_R + centred_R / (d.std(centred_R) + 1e-6)
    return d.whiten(d.on_tokens(total_R))


def dense_token_baseline(d: Dense) -> Tensor:
    energy_RT = d.masked((1 - 2 * d.logprobs_RT.exp() + d.squared_RT) * d.weights_RT.square())
    weight_RT = d.masked(energy_RT.cumsum(1))
    to_go_RT = d.to_go()
    baselines_PT = d.group_sums(to_go_RT * weight_RT) / (d.group_sums(weight_RT) + 1e-8)
    if d.mask_RT is not None:
        # A single remaining row has no baseline.
        baselines_PT = baselines_PT.masked_fill(d.group_sums(d.mask_RT) == 1, 0.0)
    return d.masked(to_go_RT - baselines_PT[d.group_R])


def dense_turn_grpo(d: Dense) -> Tensor:
    returns_RK = _discounted_turns(d.turn_sums(d.rewards_RT))
    present_RK = torch.ones_like(returns_RK) if d.mask_RT is None else d.mask_RT[:, ::TURN]
    counts_PK = d.group_sums(present_RK)
    centred_RK = (returns_RK - (d.group_sums(returns_RK) / counts_PK)[d.group_R]) * present_RK
    deviations_PK = (d.group_sums(centred_RK.square()) / (counts_PK - 1)).sqrt()
    advantages_RK = centred_RK / (deviations_PK + 1e-6)[d.group_R]
    advantages_RK = torch.where((counts_PK == 1)[d.group_R], 0.0, advantages_RK)
    return d.on_turns(advantages_RK)


def dense_turn_gae(d: Dense) -> Tensor:
    values_RK = d.masked(d.values_RT)[:, ::TURN]
    next_RK = torch.cat([values_RK[:, 1:], values_RK.new_zeros(ROWS, 1)], 1)
    deltas_RK = d.turn_sums(d.rewards_RT) + GAMMA * next_RK - values_RK
    advantages_RK = _discounted_turns(deltas_RK, GAMMA * LAM)
    _ = d.on_turns(advantages_RK + values_RK)  # ours also computes the critic's returns
    return d.whiten(d.on_turns(advantages_RK))


def _discounted_turns(values_RK: Tensor, decay: float = GAMMA) -> Tensor:
    sums_KR = values_RK.t().contiguous()
    for turn in range(len(sums_KR) - 2, -1, -1):
        sums_KR[turn].add_(sums_KR[turn + 1], alpha=decay)
    return sums_KR.t()


DENSE: dict[str, tuple[dict[str, Any], Callable[[Dense], Tensor]]] = {
    "grpo": ({}, dense_grpo),
    "dr_grpo": ({}, lambda d: d.on_tokens(d.centred(d.scores_R))),
    "grpo_passk": ({}, dense_passk),
    "gpg": ({}, dense_gpg),
    "maxrl": ({}, dense_maxrl),
    "rloo": ({}, lambda d: d.on_tokens(d.centred(d.scores_R) * (GROUP / (GROUP - 1)))),
    "opo": ({}, dense_opo),
    "remax": ({}, lambda d: d.masked(d.to_go() - d.baselines_R[:, None])),
    "pkpo": ({"k": 4}, dense_pkpo),
    "reinforce_plus_plus": ({"gamma": GAMMA}, lambda d: d.whiten(d.discounted(d.rewards_RT, GAMMA))),
    "reinforce_plus_plus_baseline": ({}, lambda d: d.whiten(d.on_tokens(d.centred(d.scores_R)))),
    "gae": ({"gamma": GAMMA, "lam": LAM}, dense_gae),
    "gdpo": ({}, dense_gdpo),
    "turn_grpo": ({"gamma": GAMMA}, dense_turn_grpo),
    "turn_gae": ({"gamma": GAMMA, "lam": LAM}, dense_turn_gae),
    "optimal_token_baseline": ({}, dense_token_baseline),
    "tir_optimal_token_baseline": ({}, dense_token_baseline),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--estimators", nargs="+", choices=list(DENSE), default=list(DENSE))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    assert list(DENSE) == list(estimator_models())
    torch.set_num_threads(1)
    results = {shape: _measure(shape, arguments.estimators, arguments.repeats) for shape in ("equal", "ragged")}
    worst = max(row["ratio"] for row in results["equal"].values())
    print(f"worst ratio on equal lengths: {worst:.2f} (limit {LIMIT})")
    if arguments.output:
        command = "python benchmarks/estimator_cost.py " + " ".join(sys.argv[1:])
        record = {"command": command, "torch": torch.__version__, "rows": ROWS, "limit": LIMIT, **results}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if worst <= LIMIT else 1


def _measure(shape: str, names: list[str], repeats: int) -> dict[str, dict[str, float]]:
    batch, dense = _inputs(shape)
    results = {}
    print(
        f"{shape}: {len(batch.rewards_N):,} tokens in {ROWS:,} rows\n{'':30}{'ours s':>10}{'dense s':>10}{'ratio':>8}"
    )
    for name in names:
        values, by_hand = DENSE[name]
        options = estimator_models()[name](**values)
        got_N, want_RT = estimate(batch, options).advantages_N, by_hand(dense)
        want_N = want_RT.view(-1) if dense.mask_RT is None else want_RT[dense.mask_RT.bool()]
        torch.testing.assert_close(got_N, want_N, rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        del got_N, want_N, want_RT
        ours, theirs = [], []
        for _ in range(repeats):
            # A new batch each time, because filling its caches is part of the cost.
            ours.append(_seconds(lambda options=options: estimate(_copy(batch), options)))
            theirs.append(_seconds(lambda by_hand=by_hand: by_hand(dense)))
        row = {"seconds": statistics.median(ours), "dense_seconds": statistics.median(theirs)}
        results[name] = {**row, "ratio": row["seconds"] / row["dense_seconds"]}
        print(f"{name:30}{row['seconds']:10.4f}{row['dense_seconds']:10.4f}{results[name]['ratio']:8.2f}")
    return results


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _copy(batch: EstimatorBatch) -> EstimatorBatch:
    return EstimatorBatch(**{name: getattr(batch, name) for name in EstimatorBatch.__dataclass_fields__})


def _inputs(shape: str) -> tuple[EstimatorBatch, Dense]:
    generator = torch.Generator().manual_seed(0)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    lengths_R = torch.full((ROWS,), LONGEST)
    if shape == "ragged":
        lognormal_R = (torch.randn(ROWS, generator=generator) * 0.6 + 6.0).exp()
        lengths_R = lognormal_R.long().clamp(1, LONGEST)
    mask_RT = torch.arange(LONGEST) < lengths_R[:, None]
    rewards_RT = torch.zeros(ROWS, LONGEST, dtype=torch.float64)
    rewards_RT[torch.arange(ROWS), lengths_R - 1] = uniform(ROWS)
    columns_RT = [column * mask_RT for column in (rewards_RT, *(uniform(ROWS, LONGEST) for _ in range(4)))]
    columns_RT[2].neg_()
    columns_RT[4].add_(0.5)
    group_R = torch.arange(ROWS).remainder(ROWS // GROUP)[torch.randperm(ROWS, generator=generator)]
    baselines_R, components_RC = uniform(ROWS), uniform(ROWS, 2)
    turns_RT = torch.arange(LONGEST).div(TURN, rounding_mode="floor").expand(ROWS, LONGEST).contiguous()
    mask = None if shape == "equal" else mask_RT.double()
    dense = Dense(*columns_RT, baselines_R, components_RC, group_R, turns_RT, mask)
    rewards_N, values_N, logprobs_N, squared_N, weights_N = (column_RT[mask_RT] for column_RT in columns_RT)
    batch = EstimatorBatch(
        rewards_N,
        lengths_R,
        group_R,
        baselines_R,
        components_RC,
        values_N,
        logprobs_N,
        squared_N,
        weights_N,
        torch.arange(LONGEST).expand(ROWS, LONGEST)[mask_RT],
        turns_RT[mask_RT],
    )
    return batch, dense


if __name__ == "__main__":
    sys.exit(main())
