"""Off-policy correction against golden values and numbers worked out by hand, and the proximal log-probs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.trainer.off_policy.correct import Corrected, correct
from tandem.trainer.off_policy.diagnostics import correction_sums
from tandem.trainer.off_policy.options import CorrectionOptions, RejectionOptions
from tandem.trainer.off_policy.proximal import loglinear_proximal, proximal_logprobs
from tandem.trainer.off_policy.weights import mean_weight
from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO, LossTokens, policy_loss_sum
from tandem.trainer.policy_losses.options import loss_models
from tandem.trainer.policy_losses.registry import policy_loss
from tests.support.golden_cases import GoldenCase, flatten, golden_cases, unflatten
from tests.trainer.test_aggregation import golden_shares

LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}


def golden_options(hyper: dict[str, Any]) -> CorrectionOptions:
    """A golden case's hyper-parameters as options."""
    weights: dict[str, Any] = {"level": "none"}
    if hyper.get("rollout_is"):
        bound = hyper["rollout_is_threshold"]
        weights = {"level": hyper["rollout_is"], "normalize": hyper.get("rollout_is_batch_normalize", False)}
        if isinstance(bound, str):  # lo_hi: IcePop
            low, high = map(float, bound.split("_"))
            weights |= {"low": low, "high": high, "outside": "zero"}
        else:
            weights["high"] = bound
    modes = [mode for mode in (hyper.get("rollout_rs") or "").split(",") if mode]
    bounds = str(hyper.get("rollout_rs_threshold")).split(",")
    bounds = bounds * len(modes) if len(bounds) == 1 else bounds
    rejections = [golden_rejection(mode, bound) for mode, bound in zip(modes, bounds, strict=True)]
    return CorrectionOptions.model_validate({"preset": "token_tis", "weights": weights, "rejections": rejections})


def golden_rejection(mode: str, bound: str) -> dict[str, Any]:
    level, _, measure = mode.rpartition("_")
    test: dict[str, Any] = {"level": LEVELS[level], "measure": measure}
    if measure != "k1":
        return {**test, "high": float(bound)}
    low, high = map(float, bound.split("_")) if "_" in bound else (1 / float(bound), float(bound))
    return {**test, "low": math.log(low), "high": math.log(high)}


def golden_figures(case: GoldenCase, options: CorrectionOptions, figures: dict[str, float]) -> dict[str, float]:
    """Our metrics under the golden names. Where the golden value is a mean over all B rows, a row without tokens counts
    as a log-prob of 0.
    """
    filled = float(case.inputs["response_mask"].any(1).double().mean())
    empty = 1.0 - filled
    ours = {
        "kl": figures["behavior_proximal_kl_k1"],
        "k3_kl": figures["behavior_proximal_kl"],
        "training_ppl": figures["proximal_perplexity"] * filled + empty,
        "rollout_ppl": figures["behavior_perplexity"] * filled + empty,
        "training_log_ppl": figures["proximal_log_perplexity"] * filled,
        "rollout_log_ppl": figures["behavior_log_perplexity"] * filled,
        "log_ppl_diff": figures["log_perplexity_difference"] * filled,
        "log_ppl_abs_diff": figures["log_perplexity_difference_abs"] * filled,
        "log_ppl_diff_max": max(figures["log_perplexity_difference_max"], 0.0 if empty else -math.inf),
        "log_ppl_diff_min": min(figures["log_perplexity_difference_min"], 0.0 if empty else math.inf),
        "ppl_ratio": figures["perplexity_ratio"] * filled + empty,
        "chi2_token": figures["chi_squared_token"],
        "chi2_seq": figures["chi_squared_sequence"] * filled,
    }
    weights = options.weights
    if weights.level != "none":
        share = filled if weights.level == "sequence" else 1.0
        ours |= {
            "rollout_is_mean": figures["behavior_weight_mean"],
            "rollout_is_std": figures["behavior_weight_std"],
            "rollout_is_eff_sample_size": figures["effective_sample_size"],
            "rollout_is_ratio_fraction_high": figures["truncated_above_fraction"] * share,
        }
        # with truncation, the golden metric counts ratios below 1/cap, for which there is no bound
        if weights.outside == "zero":
            ours["rollout_is_ratio_fraction_low"] = figures["truncated_below_fraction"] * share
        if weights.level == "sequence":
            ours["rollout_is_seq_fraction_high"] = ours["rollout_is_ratio_fraction_high"]
            if weights.outside == "zero":
                ours["rollout_is_seq_fraction_low"] = ours["rollout_is_ratio_fraction_low"]
        if weights.level == "token":  # for sequences, the golden metric is the ratio, not the weight
            ours |= {"rollout_is_max": figures["behavior_weight_max"], "rollout_is_min": figures["behavior_weight_min"]}
            if weights.outside == "zero":
                ours["rollout_is_oob_ratio"] = figures["truncated_fraction"]
    for test in options.rejections:
        mode = f"{next(golden for golden, level in LEVELS.items() if level == test.level)}_{test.measure}"
        ours |= {
            f"rollout_rs_{mode}_mean": figures[f"rejection/{test.name}/mean"],
            f"rollout_rs_{mode}_max": figures[f"rejection/{test.name}/max"],
            f"rollout_rs_{mode}_masked_fraction": figures[f"rejection/{test.name}/rejected_fraction"],
            f"rollout_rs_{mode}_seq_masked_fraction": figures[f"rejection/{test.name}/touched_row_fraction"],
        }
        if test.level != "max":  # ours is the row's minimum over tokens, the golden one the minimum of the row maxima
            ours[f"rollout_rs_{mode}_min"] = figures[f"rejection/{test.name}/min"]
        ours |= golden_row_figures(case, f"rollout_rs_{mode}", test, figures)
    if options.rejections:
        ours["rollout_rs_masked_fraction"] = figures["rejected_fraction"]
        ours["rollout_rs_seq_masked_fraction"] = figures["touched_row_fraction"] * filled
    return ours


def golden_row_figures(
    case: GoldenCase, golden: str, test: RejectionOptions, figures: dict[str, float]
) -> dict[str, float]:
    """Metrics that only golden reports for a test: fractions above and below its bounds, and row statistics."""
    whole_rows = test.level != "token"
    rejected = figures[f"rejection/{test.name}/{'touched_row' if whole_rows else 'rejected'}_fraction"]
    sides = [f"{golden}_fraction_{side}" for side in ("high", "low")]
    assert sum(case.metrics[side] for side in sides) == pytest.approx(rejected, abs=1e-7), f"{case.name}: {golden}"
    ours = {} if test.measure == "k1" else dict(zip(sides, (rejected, 0.0), strict=True))
    if whole_rows:
        greatest, least = (figures[f"rejection/{test.name}/{end}"] for end in ("max", "min"))
        ours[f"{golden}_seq_max"] = greatest
        if test.level != "max":
            ours |= {f"{golden}_seq_min": least, f"{golden}_seq_max_deviation": max(abs(greatest), abs(least))}
        if test.measure != "k1":
            ours[f"{golden}_seq_fraction_high"] = rejected
    return ours


def check_figures(
    case: GoldenCase, corrected: Corrected, columns: tuple[Tensor, Tensor, Tensor], options: CorrectionOptions
) -> None:
    proximal_N, behavior_N, lengths_B = columns
    staleness_N = torch.zeros_like(proximal_N, dtype=torch.int64)
    figures = correction_sums(corrected, proximal_N, behavior_N, lengths_B, staleness_N, options).figures()
    for name, value in golden_figures(case, options, figures).items():
        case.check_metric(name, value)
    if options.weights.normalize:
        mean = mean_weight(corrected.bounded_N, corrected.keep_N, lengths_B, options.weights.level)
        case.check_metric("rollout_is_batch_norm_factor", float(mean))


@pytest.mark.parametrize("case", golden_cases("rollout_correction/"), ids=lambda case: case.name)
def test_correction_agrees_with_golden_values(case: GoldenCase) -> None:
    mask_BT = case.inputs["response_mask"]
    proximal_N, lengths_B = flatten(case.inputs["old_log_prob"], mask_BT)
    behavior_N, _ = flatten(case.inputs["rollout_log_prob"], mask_BT)
    options = golden_options(case.hyper)
    corrected = correct(proximal_N, behavior_N, lengths_B, options)
    case.check("modified_mask", unflatten(corrected.keep_N.double(), mask_BT))
    if "is_weights" in case.outputs:
        case.check("is_weights", unflatten(corrected.weights_N, mask_BT))
    check_figures(case, corrected, (proximal_N, behavior_N, lengths_B), options)


@pytest.mark.parametrize("case", golden_cases("policy_loss/bypass_mode/"), ids=lambda case: case.name)
def test_bypass_agrees_with_golden_values(case: GoldenCase) -> None:
    """Checks weights and rejection of π_current/π_behavior, and that rejected tokens leave the loss's denominators."""
    mask_BT = case.inputs["response_mask"]
    behavior_N, lengths_B = flatten(case.inputs["old_log_prob"], mask_BT)
    advantages_N, _ = flatten(case.inputs["advantages"], mask_BT)
    current_BT = case.inputs["log_prob"].clone().requires_grad_()
    current_N, _ = flatten(current_BT, mask_BT)
    hyper = case.hyper["rollout_correction"]
    options = golden_options(hyper).model_copy(update={"proximal": "bypassed"})
    assert options.needs_ratio_free_loss == bool(hyper["rollout_is"])
    loss_proximal_N, proximal_N = proximal_logprobs(
        options.proximal, current_logprobs_N=current_N, behavior_logprobs_N=behavior_N
    )
    assert loss_proximal_N is behavior_N
    corrected = correct(proximal_N, behavior_N, lengths_B, options)

    # A clipped surrogate bounds the ratio that the weights would correct, so the weights are not applied.
    clips = hyper["loss_type"] == "ppo_clip"
    names = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high", "dual_clip": "clip_ratio_c"} if clips else {}
    model = loss_models()["clipped_surrogate" if clips else "reinforce"]
    weights_N = torch.ones_like(corrected.weights_N) if clips else corrected.weights_N
    tokens = LossTokens(current_N, loss_proximal_N, behavior_N, advantages_N, weights_N, lengths_B)
    tokens = tokens.kept(corrected.keep_N)
    terms = policy_loss(tokens, model(**{ours: case.hyper[theirs] for ours, theirs in names.items()}))
    loss = policy_loss_sum(terms, golden_shares(tokens.lengths_B, case.hyper["loss_agg_mode"], {}, mask_BT.shape[1]))
    loss.backward()
    assert current_BT.grad is not None
    case.check("loss", loss.detach())
    case.check("grad_log_prob", current_BT.grad)
    check_figures(case, corrected, (proximal_N, behavior_N, lengths_B), options)
    case.check_metric("ppo_kl", float(terms.marks["ppo_kl"].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).mean()))
    if clips:
        case.check_metric("pg_clipfrac", float(terms.marks["clipped"].double().mean()))
        case.check_metric("pg_clipfrac_lower", float(terms.marks["clipped_lower"].double().mean()))


# ---- worked out by hand ----


def rows_of(*rows: list[float]) -> tuple[Tensor, Tensor]:
    """(values_N, lengths_B) of rows."""
    flat = [value for row in rows for value in row]
    return torch.tensor(flat, dtype=torch.float64), torch.tensor([len(row) for row in rows])


def run(ratios: tuple[list[float], ...], advantages: list[float] | None = None, **options: Any) -> Corrected:
    """Corrects rows with the given ratios."""
    ratio_N, lengths_B = rows_of(*ratios)
    behavior_N = torch.linspace(-3.0, -0.5, len(ratio_N), dtype=torch.float64)
    advantages_N = None if advantages is None else torch.tensor(advantages)
    given = CorrectionOptions.model_validate({"preset": "token_tis", **options})
    return correct(behavior_N + ratio_N.log(), behavior_N, lengths_B, given, advantages_N=advantages_N)


TOKEN_STOP = {"level": "token", "low": 0.75, "high": 1.5, "outside": "stop"}


@pytest.mark.parametrize(
    ("weights", "advantages", "expected"),
    [
        ({"level": "token", "high": 1.5}, None, [1.0, 1.5, 0.5, 1.5]),
        ({"level": "sequence", "high": 8.0}, None, [1.0, 4.0, 4.0, 4.0]),
        ({"level": "geometric", "high": 8.0}, None, [1.0, 4 ** (1 / 3), 4 ** (1 / 3), 4 ** (1 / 3)]),
        ({"level": "token", "low": 0.75, "high": 5.0, "outside": "clamp"}, None, [1.0, 4.0, 0.75, 2.0]),
        ({"level": "token", "low": 0.75, "high": 3.0, "outside": "zero"}, None, [1.0, 0.0, 0.0, 2.0]),
        ({"level": "token", "high": 5.0, "normalize": True}, None, [1 / 1.875, 4 / 1.875, 0.5 / 1.875, 2 / 1.875]),
        ({"level": "sequence", "high": 8.0, "normalize": True}, None, [0.4, 1.6, 1.6, 1.6]),
        ({"level": "none"}, None, [1.0] * 4),
        # `stop`: 0 if the advantage pushes the token further out of bounds; of a sequence, for the tokens it pushes
        (TOKEN_STOP, [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.5, 0.0]),
        (TOKEN_STOP, [-1.0, -1.0, -1.0, -1.0], [1.0, 1.5, 0.0, 1.5]),
        (TOKEN_STOP, [0.0, 0.0, 0.0, 0.0], [1.0, 1.5, 0.5, 1.5]),
        ({**TOKEN_STOP, "level": "sequence", "high": 3.9}, [1.0, 1.0, -1.0, 1.0], [1.0, 0.0, 3.9, 0.0]),
    ],
)
def test_weights(weights: dict[str, Any], advantages: list[float] | None, expected: list[float]) -> None:
    corrected = run(([1.0], [4.0, 0.5, 2.0]), advantages, weights=weights)
    assert corrected.weights_N.tolist() == pytest.approx(expected)
    assert corrected.keep_N.all(), "a token that is stopped stays in the denominators"


def test_normalized_weights_average_1_over_kept_tokens() -> None:
    test = {"level": "token", "measure": "ratio", "high": 3.0}
    corrected = run(
        ([1.0], [4.0, 0.5, 2.0]), weights={"level": "token", "high": 9.0, "normalize": True}, rejections=[test]
    )
    assert corrected.keep_N.tolist() == [True, False, True, True]
    assert float(corrected.weights_N[corrected.keep_N].mean()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("test", "kept"),
    [
        ({"level": "token", "measure": "ratio", "high": 3.0}, [1, 0, 1, 1]),
        ({"level": "token", "measure": "ratio", "low": 0.75, "high": 3.0}, [1, 0, 0, 1]),
        ({"level": "sequence", "measure": "ratio", "high": 3.9}, [1, 0, 0, 0]),
        ({"level": "sequence", "measure": "ratio", "high": 4.1}, [1, 1, 1, 1]),
        ({"level": "geometric", "measure": "ratio", "high": 1.58}, [1, 0, 0, 0]),
        ({"level": "geometric", "measure": "ratio", "high": 1.59}, [1, 1, 1, 1]),
        ({"level": "max", "measure": "ratio", "high": 3.9}, [1, 0, 0, 0]),
        ({"level": "max", "measure": "ratio", "low": 0.6}, [1, 0, 0, 0]),
        ({"level": "max", "measure": "ratio", "low": 0.4, "high": 4.1}, [1, 1, 1, 1]),
        ({"level": "token", "measure": "k1", "low": -1.0}, [1, 0, 1, 1]),
        ({"level": "token", "measure": "k1", "high": 0.5}, [1, 1, 0, 1]),
        ({"level": "token", "measure": "k2", "high": 0.5}, [1, 0, 1, 1]),
        ({"level": "token", "measure": "k3", "high": 0.5}, [1, 0, 1, 1]),
        ({"level": "sequence", "measure": "k2", "high": 1.44}, [1, 0, 0, 0]),
        ({"level": "sequence", "measure": "k2", "high": 1.45}, [1, 1, 1, 1]),
    ],
)
def test_rejection(test: dict[str, Any], kept: list[int]) -> None:
    corrected = run(([1.0], [4.0, 0.5, 2.0]), rejections=[test])
    assert corrected.keep_N.tolist() == [bool(keep) for keep in kept]


def test_rejected_tokens_and_rows_are_counted() -> None:
    """One row loses one token, one loses all tokens, and one loses none."""
    tests = (RejectionOptions(high=3.0), RejectionOptions(level="max", low=0.1))
    options = CorrectionOptions(preset="token_tis", rejections=tests)
    ratio_N, lengths_B = rows_of([1.0, 4.0], [0.05, 1.0, 5.0], [1.0])
    corrected = correct(ratio_N.log(), torch.zeros(6, dtype=torch.float64), lengths_B, options)
    staleness_N = torch.tensor([0, 0, 2, 2, 2, 0])
    figures = correction_sums(corrected, ratio_N.log(), ratio_N * 0, lengths_B, staleness_N, options).figures()
    expected = {
        "rejected_fraction": 4 / 6,
        "rejected_row_fraction": 1 / 3,
        "touched_row_fraction": 2 / 3,
        "truncated_fraction": 2 / 6,
        "behavior_weight_max": 2.0,
        "behavior_weight_min": 0.05,
        "rejection/token_ratio/rejected_fraction": 2 / 6,
        "rejection/token_ratio/touched_row_fraction": 2 / 3,
        "rejection/token_ratio/max": 5.0,
        "rejection/token_ratio/min": 0.05,
        "rejection/token_ratio/mean": 12.05 / 6,
        "rejection/max_ratio/rejected_fraction": 3 / 6,
        "rejection/max_ratio/touched_row_fraction": 1 / 3,
        "rejection/max_ratio/mean": (2 * 4 + 3 * 5 + 1) / 6,
        "rejection/max_ratio/min": 0.05,
        "staleness_0/rejected_fraction": 1 / 3,
        "staleness_0/rejected_row_fraction": 0.0,
        "staleness_2/rejected_row_fraction": 1.0,
        "staleness_2/truncated_fraction": 1 / 3,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_a_catastrophic_token_rejects_its_row() -> None:
    corrected = run(([1.0, 2e-4], [1.0, 5e-5, 3.0], [0.9]), veto=1e-4)
    assert corrected.keep_N.tolist() == [True, True, False, False, False, True]
    assert run(([1e-30, 1.0], [1.0]), veto=1e-12).keep_N.tolist() == [False, False, True], "beyond the clamp of weights"


def test_only_negative_advantages_can_be_rejected() -> None:
    test = {"level": "geometric", "measure": "k1", "high": 0.5, "negative_only": True}
    ratios = ([0.1, 0.2], [0.1, 0.3], [0.9, 0.8])
    corrected = run(ratios, advantages=[1.0, 1.0, -1.0, -1.0, -1.0, -1.0], rejections=[test])
    assert corrected.keep_N.tolist() == [True, True, False, False, True, True]


# ---- proximal log-probs ----


@pytest.mark.parametrize(
    ("behavior", "current", "versions", "batch_version", "expected"),
    [
        ([-1.0, -2.0, -3.0], [-1.5, -2.5, -3.5], [0, 0, 0], 2, [-1.25, -2.25, -3.25]),
        ([-1.0, -2.0], [-1.5, -2.2], [0, 2], 4, [-1.375, -2.1]),
        ([-1.0, -1.0], [-3.0, -3.0], [3, 4], 4, [-1.0, -1.0]),  # at the proximal policy's version or newer
    ],
)
def test_loglinear_follows_the_published_interpolation(
    behavior: list[float], current: list[float], versions: list[int], batch_version: int, expected: list[float]
) -> None:
    proximal = loglinear_proximal(
        torch.tensor(current, requires_grad=True),
        torch.tensor(behavior),
        torch.tensor(versions),
        batch_version=batch_version,
    )
    assert not proximal.requires_grad
    assert proximal.tolist() == pytest.approx(expected)


def test_loglinear_depends_on_the_progress_within_the_batch() -> None:
    current, behavior = torch.tensor([-2.0, -2.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0])
    # 0, 1 and 3 versions behind the start of the batch; versions ahead of it
    stale, newer = torch.tensor([4, 3, 1]), torch.tensor([5, 6, 7])

    def at(progress: float, versions: Tensor = stale) -> list[float]:
        return loglinear_proximal(current, behavior, versions, batch_version=5, progress=progress).tolist()

    assert at(0.0) == [-2.0, -2.0, -2.0], "before the first step the current policy is the proximal one"
    assert at(0.5) == pytest.approx([-1.0, -1.0 - 1 / 1.5, -1.0 - 3 / 3.5])
    assert at(1.0) == pytest.approx([-1.0, -1.5, -1.75])
    assert (at(0.0, newer), at(0.5, newer)) == ([-2.0] * 3, [-1.0] * 3)


def test_the_source_of_proximal_logprobs() -> None:
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    behavior, recomputed = torch.tensor([-1.5, -1.5]), torch.tensor([-3.0, -3.0])

    def pair(method: str, **more: Any) -> tuple[list[float], list[float]]:
        found = proximal_logprobs(method, current_logprobs_N=current, behavior_logprobs_N=behavior, **more)
        assert not any(tensor.requires_grad for tensor in found)
        return found[0].tolist(), found[1].tolist()

    assert pair("recomputed", recomputed_N=recomputed) == ([-3.0, -3.0], [-3.0, -3.0])
    assert pair("recomputed") == ([-1.0, -2.0], [-1.0, -2.0])
    assert pair("bypassed") == ([-1.5, -1.5], [-1.0, -2.0])
    assert pair("loglinear", versions_N=torch.tensor([0, 0]), batch_version=2) == ([-1.25, -1.75], [-1.25, -1.75])
