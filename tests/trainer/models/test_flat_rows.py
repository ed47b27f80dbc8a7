"""Rows packed end to end give the same numbers as padded rows, and a model that mixes rows is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    FalconH1Config,
    Gemma2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tandem.protos.codec import EncodedGroups
from tandem.protos.errors import ModelError
from tandem.protos.types import Segment
from tandem.trainer.batch.micro_batch import TrainingRow, stack
from tandem.trainer.batch.record import read_record, write_record
from tandem.trainer.learner import Learner
from tandem.trainer.models import flat_rows, varlen_attention
from tandem.trainer.models.flat_rows import check_row_separation, measure_row_mixing
from tandem.trainer.models.loading import load_model
from tandem.trainer.models.token_model import add_token_statistics
from tests.support.engine_inputs import relative_error
from tests.support.learner_rank import all_weights
from tests.support.packed_rows import EVERY_COLUMN, EXPERTS, LATENT, SMALL, Alone, batch_of_two_steps, kernel, small
from tests.support.token_model_rank import CPU, answers, loss_of
from tests.support.training_groups import make_payloads


@pytest.fixture(scope="session")
def folder(model: Path) -> Path:
    return model


def make_rows(lengths: Sequence[int], seed: int = 0) -> list[TrainingRow]:
    """Rows of these lengths; every token after a random first position is sampled."""
    random = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        ids = random.integers(3, 98, length).astype(np.int32)
        loss_mask = (np.arange(length) >= random.integers(1, max(2, length))).astype(np.uint8)
        segment = Segment(ids, -random.random(length).astype(np.float32), loss_mask, ())
        rows.append(TrainingRow(segment, float(random.choice([0.7, 1.0])), random.random(length).astype(np.float32)))
    return rows


@given(lengths=st.lists(st.integers(1, 9), max_size=6), seed=st.integers(0, 99))
def test_flat_micro_batches_hold_the_tokens_of_padded_ones_without_padding(lengths: list[int], seed: int) -> None:
    rows = make_rows(lengths, seed)
    padded, flat = stack(rows, CPU), stack(rows, CPU, packing="flat")
    assert flat.flat is not None and flat.flat.ends.tolist() == [0, *np.cumsum(lengths or [1])]
    assert flat.ids_BT.tolist() == [[int(token) for row in rows for token in row.segment.ids] or [0]]
    assert flat.flat.positions_BT.tolist() == [[place for length in lengths or [1] for place in range(length)]]
    assert flat.flat.longest == max(lengths, default=1)
    before_N = flat.ids_BT[flat.row_N, flat.columns_K[flat.column_N] + 1]
    assert before_N.equal(flat.target_N)
    assert [place for place in flat.columns_K[flat.column_N] + 1 if place in flat.flat.ends] == []
    for name in (*("target_N", "temperature_N", "behavior_logprobs_N", "versions_N"), "lengths_B", "token_rewards_N"):
        assert getattr(flat, name).equal(getattr(padded, name)), name


@settings(max_examples=5, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=st.integers(0, 99))
@pytest.mark.parametrize("architecture", ["tokens", "logits"])
def test_statistics_and_gradients_equal_those_of_padded_rows_in_float64(
    folder: Path, architecture: str, lengths: list[int], seed: int
) -> None:
    if architecture == "tokens":
        model = load_model(folder, "float32").double()
    else:  # its logits are scaled after the head, and its attention windows are shorter than the rows
        model = small(Gemma2Config(**SMALL, sliding_window=4, final_logit_softcapping=0.5), torch.float64)
        add_token_statistics(model)
    found: list[Any] = []
    for packing in ("padded", "flat"):
        batch = stack(make_rows(lengths, seed), CPU, packing=packing)  # type: ignore[arg-type]
        statistics = answers(model, batch)
        loss_of(statistics, batch).backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        found.append([*statistics, gradients])
        model.zero_grad()
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "apart"),
    [
        (MistralConfig(**SMALL, sliding_window=4), True),
        (Qwen3MoeConfig(**SMALL, **EXPERTS), True),
        (Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]), False),
        (Qwen3NextConfig(**SMALL, **EXPERTS, layer_types=["linear_attention", "full_attention"]), False),
        (FalconH1Config(**SMALL, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16), False),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_that_mixes_rows_is_refused(config: Any, apart: bool, dtype: torch.dtype) -> None:
    engine = Alone(small(config, dtype))
    if apart:
        check_row_separation([engine], engine)  # type: ignore[arg-type]
        return
    with pytest.raises(ModelError, match=r"does not keep rows apart .*trainer\.packing") as refusal:
        check_row_separation([engine], engine)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


def test_a_model_without_position_ids_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder, "float32")
    monkeypatch.setattr(model, "forward", lambda input_ids, use_cache: model.base_model(input_ids, use_cache=use_cache))
    with pytest.raises(
        ModelError, match=r"cannot run rows that are packed end to end .*position_ids.*trainer\.packing"
    ):
        check_row_separation([Alone(model)], Alone(model))  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize("config", [MistralConfig(**SMALL, sliding_window=4), LlamaConfig(**SMALL), LATENT])
def test_variable_length_attention_gets_the_right_row_boundaries(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "_kernel", kernel)
    model = small(config, torch.float64)
    rows = make_rows([3, 9, 1, 12, 9])
    expected = answers(model, stack(rows, CPU))
    model.set_attn_implementation(varlen_attention.TORCH_VARLEN)
    assert max(measure_row_mixing(Alone(model), CPU)) < 1e-6
    for packing in ("flat", "padded"):
        found = answers(model, stack(rows, CPU, packing=packing))  # type: ignore[arg-type]
        torch.testing.assert_close(list(found), list(expected), rtol=1e-6, atol=1e-9)


def test_variable_length_attention_refuses_softcapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "_kernel", kernel)
    engine = Alone(small(Gemma2Config(**SMALL)))
    engine.module.set_attn_implementation(varlen_attention.TORCH_VARLEN)
    with pytest.raises(ValueError, match="knows no softcap"):
        check_row_separation([engine], engine)  # type: ignore[arg-type]


MakeLearner = Callable[..., Learner]


@pytest.fixture(name="make_learner")
def learner_of_two_steps(make_learner: MakeLearner) -> MakeLearner:
    return partial(make_learner, optimizer_steps_per_batch=2)


@pytest.mark.parametrize(
    "given",
    [{"zero_stage": 0}, EVERY_COLUMN, {"zero_stage": 0, "lora": {"rank": 4}, "gradient_checkpointing": True}],
    ids=["default", "critic, reference, entropy, rejection", "adapters, checkpointed activations"],
)
def test_flat_rows_train_the_same_weights(make_learner: MakeLearner, folder: Path, given: Any) -> None:
    ends, figures = [], []
    for packing, budget in (("padded", 2000), ("flat", 2000), ("flat", 60)):
        learner = make_learner(packing=packing, **given)
        assert learner.packings == (packing,)
        start = all_weights(learner)
        for version in (1, 2):
            batch, by_id = batch_of_two_steps(version, folder, packing, budget)
            metrics = dict(learner.train(learner.prepare(batch, by_id)).metrics)
        ends.append(all_weights(learner))
        figures.append(metrics)
    for weights, metrics in zip(ends[1:], figures[1:], strict=True):
        assert metrics["padding_fraction"] == 0 < figures[0]["padding_fraction"]
        for part in {name.partition(".")[0] for name in start}:  # the policy's and the critic's
            mine = [{name: one[name] for name in one if name.startswith(part)} for one in (weights, ends[0], start)]
            assert relative_error(*mine) <= 3e-4, part  # padded splits differ by 1e-4 too
        for name in metrics.keys() - {"padding_fraction", "num_micro_batches"}:
            if not name.startswith("seconds"):
                assert metrics[name] == pytest.approx(figures[0][name], rel=1e-3, abs=1e-5), name


def test_a_recorded_batch_is_trained_with_its_recorded_packing(
    make_learner: MakeLearner, folder: Path, tmp_path: Path
) -> None:
    batch, by_id = batch_of_two_steps(1, folder, "flat", 60)
    write_record(tmp_path, batch, EncodedGroups.of(make_payloads(by_id.values())))
    recorded, _ = read_record(tmp_path, 1)
    assert recorded == batch and recorded.packing == "flat"
    ends = []
    for packing in ("flat", "auto"):  # "auto" would pad on a CPU
        learner = make_learner(packing=packing)
        learner.train(learner.prepare(recorded, by_id))
        ends.append(all_weights(learner))
    assert learner.packings == ("padded", "shared")
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def _own_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("tandem.")]


def test_auto_pads_and_logs_why_if_the_model_mixes_rows(
    make_learner: MakeLearner, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert make_learner().packings == ("padded", "shared")
    assert not _own_lines(caplog)
    monkeypatch.setattr(flat_rows, "varlen_attention", lambda model, device, dtype: "eager")
    learner = make_learner()
    assert learner.packings == ("flat",) and learner._model.config._attn_implementation == "eager"
    assert _own_lines(caplog) == [
        "rows are packed as flat, because prompts cannot be shared: "
        'Qwen2ForCausalLM cannot share prompts (its attention is eager): set trainer.packing = "padded"'
    ]
    caplog.clear()
    monkeypatch.setattr(flat_rows, "measure_row_mixing", lambda engine, device, packing: (0.4, 1.0))
    learner = make_learner()
    assert learner.packings == ("padded",) and learner._model.config._attn_implementation == "sdpa"
    flat, shared = _own_lines(caplog)
    mixes = "Qwen2ForCausalLM does not keep rows apart that"
    assert flat.startswith(f"rows are padded, because they cannot be packed end to end: {mixes} are packed")
    assert shared.startswith(f"rows are packed as padded, because prompts cannot be shared: {mixes} share a prompt")
    with pytest.raises(ModelError, match="does not keep rows apart"):
        make_learner(packing="flat")
    with pytest.raises(ModelError, match="does not keep rows apart"):
        learner.train(learner.prepare(*batch_of_two_steps(1, folder, "flat", 60)))


@pytest.mark.gpu
def test_a_gpu_trains_flat_rows_with_variable_length_attention(make_learner: MakeLearner, folder: Path) -> None:
    losses = []
    for packing in ("padded", "auto"):
        learner = make_learner(packing=packing, dtype="bfloat16")
        losses.append(
            learner.train(learner.prepare(*batch_of_two_steps(1, folder, learner.packings[0], 2000))).metrics["loss"]
        )
    assert learner.packings == ("flat", "shared")
    assert learner._model.config._attn_implementation in ("flash_attention_2", varlen_attention.TORCH_VARLEN)
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)


def test_the_dtype_of_the_forward_pass_decides_whether_rows_are_packed(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []
    monkeypatch.setattr(flat_rows, "varlen_attention", lambda model, device, dtype: seen.append(dtype))
    learner = make_learner(packing="auto", dtype="bfloat16", backend="fsdp")
    assert next(learner._model.parameters()).dtype == torch.float32, "master weights"
    assert seen == [torch.bfloat16]
