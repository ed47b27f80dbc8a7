"""Rows that share a prompt give the same numbers as separate rows, and a model that cannot share is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    FalconH1Config,
    Gemma2Config,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tandem.protos.codec import EncodedGroups
from tandem.protos.errors import ModelError
from tandem.protos.types import Segment
from tandem.trainer.batch.micro_batch import TrainingRow, stack
from tandem.trainer.batch.record import read_record, write_record
from tandem.trainer.batch.shared_prompts import SharedPrompts
from tandem.trainer.learner import Learner
from tandem.trainer.models import shared_attention, varlen_attention
from tandem.trainer.models.flat_rows import RowPacking, measure_row_mixing
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.shared_attention import SHARED_PROMPTS
from tandem.trainer.models.token_model import add_token_statistics
from tests.support.engine_inputs import relative_error
from tests.support.learner_rank import all_weights
from tests.support.packed_rows import EVERY_COLUMN, EXPERTS, LATENT, SMALL, Alone, batch_of_two_steps, kernel, small
from tests.support.token_model_rank import CPU, answers, loss_of
from tests.support.training_groups import make_payloads

MakeLearner = Callable[..., Learner]
Sizes = Sequence[tuple[int, int]]
"""(number of the prompt, number of tokens after it) of each row; prompt n has n + 1 tokens. Equal pairs are equal rows,
but for their loss masks and temperatures.
"""
MIXED = [(2, 3), (0, 5), (2, 8), (5, 1), (2, 1), (5, 30), (7, 4), (0, 2), (2, 8), (5, 30), (2, 8)]


def make_rows(sizes: Sizes, seed: int = 0) -> list[TrainingRow]:
    """Rows in which about a third of the tokens after the first answer token are no loss tokens."""
    random = np.random.default_rng(seed)
    rows = []
    for prompt, num_rest in sizes:
        first = np.random.default_rng([7, prompt]).integers(3, 98, prompt + 1)
        rest = np.random.default_rng([seed, prompt, num_rest]).integers(3, 98, num_rest)
        ids = np.concatenate([first, rest]).astype(np.int32)
        loss_mask = np.r_[np.zeros(prompt + 1), 1, random.random(num_rest - 1) < 0.7].astype(np.uint8)
        segment = Segment(ids, -random.random(len(ids)).astype(np.float32), loss_mask, ())
        rows.append(TrainingRow(segment, float(random.choice([0.7, 1.0])), random.random(len(ids)).astype(np.float32)))
    return rows


def num_inputs(row: TrainingRow) -> int:
    """Tokens before the last loss token."""
    return int(np.flatnonzero(row.segment.loss_mask)[-1])


sizes_of_rows = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=8)


@given(sizes=sizes_of_rows, seed=st.integers(0, 99))
def test_a_line_holds_each_prompt_and_each_rest_once_and_every_row_at_its_positions(sizes: Sizes, seed: int) -> None:
    rows = make_rows(sizes, seed)
    padded, shared = stack(rows, CPU), stack(rows, CPU, packing="shared")
    assert shared.shared is not None
    prompts = {prompt: prompt + 1 for prompt, _ in sizes}
    rests = {
        (prompt, *row.segment.ids[prompt + 1 : num_inputs(row)]) for row, (prompt, _) in zip(rows, sizes, strict=True)
    }
    assert shared.ids_BT.shape == (1, sum(prompts.values()) + sum(len(rest) - 1 for rest in rests) or 1)
    for number, row in enumerate(rows):
        columns = shared.shared.columns(number, np.arange(num_inputs(row)))
        assert shared.ids_BT[0, columns].tolist() == row.segment.ids[: num_inputs(row)].tolist()
        assert shared.shared.positions_BT[0, columns].tolist() == list(range(num_inputs(row)))
    for name in (*("target_N", "temperature_N", "behavior_logprobs_N", "versions_N"), "lengths_B", "token_rewards_N"):
        assert getattr(shared, name).equal(getattr(padded, name)), name


@given(sizes=sizes_of_rows)
def test_every_token_sees_its_own_row_up_to_itself(sizes: Sizes) -> None:
    rows = make_rows(sizes)
    shared = stack(rows, CPU, packing="shared").shared
    assert shared is not None
    varlen, (blocks, places_T) = shared.varlen, (shared.attention.blocks, shared.attention.places_T)
    seen_by_block = [
        [set(keys[mask == 0].tolist()) for mask in masks]
        for block in blocks
        for keys, masks in zip(block.keys.columns, block.mask(None, torch.float32)[:, 0], strict=True)
    ]
    seen_by_place = [seen for sequence in seen_by_block for seen in sequence]
    seen_by_varlen = [
        set(varlen.keys[first : last - (queries - 1 - query)].tolist())
        for first, last, queries in zip(
            varlen.key_ends[:-1].tolist(), varlen.key_ends[1:].tolist(), varlen.query_ends.diff().tolist(), strict=True
        )
        for query in range(queries)
    ]
    for number, row in enumerate(rows):
        columns = shared.columns(number, np.arange(num_inputs(row)))
        for position, column in enumerate(columns):
            own = set(columns[: position + 1].tolist())
            assert seen_by_place[places_T[column]] == own == seen_by_varlen[column]


@pytest.mark.parametrize("architecture", ["tokens", "logits"])
@pytest.mark.parametrize("kernel_of", ["blocks", "variable-length"])
def test_statistics_and_gradients_equal_those_of_padded_rows_in_float64(
    model: Path, architecture: str, kernel_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_of == "variable-length":
        monkeypatch.setattr(varlen_attention, "_kernel", kernel)
        monkeypatch.setattr(shared_attention, "kernel_runs", lambda *_: True)
    if architecture == "tokens":
        policy = load_model(model, "float32").double()
    else:  # its logits are scaled after the head, and its attention windows are shorter than the rows
        policy = small(Gemma2Config(**SMALL, sliding_window=4, final_logit_softcapping=0.5), torch.float64)
        add_token_statistics(policy)
    found: list[Any] = []
    for packing, attention in (("padded", "sdpa"), ("shared", SHARED_PROMPTS)):
        policy.set_attn_implementation(attention)
        batch = stack(make_rows(MIXED), CPU, packing=packing)  # type: ignore[arg-type]
        statistics = answers(policy, batch)
        loss_of(statistics, batch).backward()
        gradients = {name: each.grad for name, each in policy.named_parameters() if each.grad is not None}
        found.append([*statistics, gradients])
        policy.zero_grad()
    # The models normalize in float32, and a shared prompt's gradients are summed before that.
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_log_probs_in_float32_differ_from_those_of_padded_rows_by_a_hundred_thousandth_at_most(model: Path) -> None:
    policy = load_model(model, "float32")
    expected = answers(policy, stack(make_rows(MIXED), CPU))
    policy.set_attn_implementation(SHARED_PROMPTS)
    found = answers(policy, stack(make_rows(MIXED), CPU, packing="shared"))
    assert (found.logprobs_N - expected.logprobs_N).abs().max() <= 1e-5


@pytest.mark.parametrize("config", [MistralConfig(**SMALL, sliding_window=4), LlamaConfig(**SMALL), LATENT])
@pytest.mark.parametrize("kernel_of", ["blocks", "variable-length"])
def test_architectures_with_attention_of_their_own_give_the_log_probs_of_padded_rows(
    config: Any, kernel_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_of == "variable-length":
        monkeypatch.setattr(varlen_attention, "_kernel", kernel)
        monkeypatch.setattr(shared_attention, "kernel_runs", lambda *_: True)
    policy = small(config, torch.float64)
    expected = answers(policy, stack(make_rows(MIXED), CPU))
    assert max(measure_row_mixing(Alone(policy), CPU, "shared")) < 1e-6  # type: ignore[arg-type]
    policy.set_attn_implementation(SHARED_PROMPTS)
    found = answers(policy, stack(make_rows(MIXED), CPU, packing="shared"))
    torch.testing.assert_close(list(found), list(expected), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**SMALL, sliding_window=4), None),
        (Gemma2Config(**SMALL, sliding_window=4), None),
        (MixtralConfig(**SMALL, num_local_experts=4), None),
        (Qwen3MoeConfig(**SMALL, **EXPERTS), None),
        (Llama4TextConfig(**SMALL, num_local_experts=2), "its attention is not transformers' common one"),
        (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), "it has layers of conv"),
        (
            Qwen3NextConfig(**SMALL, **EXPERTS, layer_types=["linear_attention", "full_attention"]),
            "it has layers of linear_attention",
        ),
        (FalconH1Config(**SMALL, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16), "it has layers of hybrid"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_that_cannot_share_prompts_is_refused_with_the_reason(
    config: Any, reason: str | None, dtype: torch.dtype
) -> None:
    engine: Any = Alone(small(config, dtype))
    if reason is None:
        packing = RowPacking("shared", [engine], engine)
        assert packing.packings == ("shared",)
        assert engine.module.config._attn_implementation == SHARED_PROMPTS
        packing.use("padded")
        assert engine.module.config._attn_implementation == "sdpa"
        return
    with pytest.raises(ModelError, match=rf'{reason}.*set trainer\.packing = "padded"') as refusal:
        RowPacking("shared", [engine], engine)
    assert "\n" not in str(refusal.value)
    assert RowPacking("auto", [engine], engine).packings == ("padded",)
    assert engine.module.config._attn_implementation == "sdpa"


def test_a_model_that_keeps_shared_prompts_from_its_attention_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_model(model, "float32")
    base = policy.base_model
    monkeypatch.setattr(
        policy, "forward", lambda input_ids, position_ids=None, **named: base(input_ids, None, position_ids)
    )
    with pytest.raises(ModelError, match=r"cannot run rows that share a prompt .*does not pass shared prompts on"):
        RowPacking("shared", [Alone(policy)], Alone(policy))  # type: ignore[arg-type, list-item]


@pytest.fixture(name="make_learner")
def learner_of_two_steps(make_learner: MakeLearner) -> MakeLearner:
    return partial(make_learner, optimizer_steps_per_batch=2)


@pytest.mark.parametrize(
    "given",
    [
        {"zero_stage": 0},
        EVERY_COLUMN,
        {"zero_stage": 0, "lora": {"rank": 4}, "gradient_checkpointing": True, "kl": {"loss": {"coefficient": 0.1}}},
    ],
    ids=["default", "critic, reference, entropy, rejection", "adapters, their reference, checkpointed activations"],
)
def test_shared_prompts_train_the_same_weights(make_learner: MakeLearner, model: Path, given: Any) -> None:
    ends, figures = [], []
    for packing, budget in (("padded", 2000), ("shared", 2000), ("shared", 60)):
        learner = make_learner(packing=packing, **given)
        start = all_weights(learner)
        for version in (1, 2):
            batch, by_id = batch_of_two_steps(version, model, packing, budget)  # type: ignore[arg-type]
            metrics = dict(learner.train(learner.prepare(batch, by_id)).metrics)
        ends.append(all_weights(learner))
        figures.append(metrics)
    assert figures[0]["shared_fraction"] == 0 < figures[2]["shared_fraction"] < figures[1]["shared_fraction"]
    for weights, metrics in zip(ends[1:], figures[1:], strict=True):
        for part in {name.partition(".")[0] for name in start}:  # the policy's and the critic's
            mine = [{name: one[name] for name in one if name.startswith(part)} for one in (weights, ends[0], start)]
            assert relative_error(*mine) <= 3e-4, part  # padded splits differ by 1e-4 too
        for name in metrics.keys() - {"padding_fraction", "shared_fraction", "num_micro_batches"}:
            if not name.startswith("seconds"):
                assert metrics[name] == pytest.approx(figures[0][name], rel=1e-3, abs=1e-5), name


def test_a_recorded_batch_is_trained_with_its_recorded_packing(
    make_learner: MakeLearner, model: Path, tmp_path: Path
) -> None:
    shared, by_id = batch_of_two_steps(1, model, "shared", 60)
    padded, _ = batch_of_two_steps(2, model, "padded", 60)
    write_record(tmp_path, shared, EncodedGroups.of(make_payloads(by_id.values())))
    recorded, _ = read_record(tmp_path, 1)
    assert recorded == shared and recorded.packing == "shared"
    ends = []
    for packing in ("shared", "auto", "padded"):
        learner = make_learner(packing=packing)
        for batch in (recorded, padded):
            learner.train(
                learner.prepare(batch, {**by_id, **batch_of_two_steps(batch.policy_version, model, "padded", 60)[1]})
            )
        ends.append(all_weights(learner))
    assert all(torch.equal(ends[0][name], end[name]) for end in ends[1:] for name in ends[0])


def test_only_the_prompt_before_the_first_loss_token_is_shared() -> None:
    ids = np.array([5, 6, 7, 8, 9], np.int32)
    masks = [np.array(mask, np.uint8) for mask in ([0, 0, 1, 1, 1], [0, 0, 1, 0, 1], [0, 0, 0, 1, 1])]
    rows = [Segment(ids, np.zeros(5, np.float32), mask, ()) for mask in masks]
    shared = SharedPrompts.of(rows, CPU)
    assert shared.ids_T.tolist() == [5, 6, 7, 8, 5, 6, 7, 8]
    assert shared.positions_BT[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.gpu
def test_a_gpu_trains_shared_prompts_with_variable_length_attention(make_learner: MakeLearner, model: Path) -> None:
    losses = []
    for packing in ("padded", "shared"):
        learner = make_learner(packing=packing, dtype="bfloat16")
        losses.append(
            learner.train(learner.prepare(*batch_of_two_steps(1, model, learner.packings[0], 2000))).metrics["loss"]
        )
    policy = learner._model.config
    assert policy._attn_implementation == SHARED_PROMPTS
    size = policy.hidden_size // policy.num_attention_heads
    heads = policy.num_attention_heads, policy.num_key_value_heads
    assert varlen_attention.kernel_runs(learner.device, torch.bfloat16, *heads, size)
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)
