"""The supervised warm start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.protos.errors import DataError
from tandem.trainer.config import SftConfig
from tandem.trainer.sft import SftRow, sample_answers, train_sft
from tests.support.tiny_model import EOS_ID, character_tokenizer

LETTERS = "abcdefgh"


def rows_to_copy() -> list[SftRow]:
    """Rows such as the prompt `a=` with the answer `a`."""
    tokenizer = character_tokenizer()
    return [SftRow(tokenizer(f"{c}=").input_ids, [*tokenizer(c).input_ids, EOS_ID]) for c in LETTERS]


def accuracy_of(model: PreTrainedModel, temperature: float) -> float:
    rows = rows_to_copy()
    answers = sample_answers(
        model,
        [row.prompt_ids for row in rows],
        max_tokens=4,
        temperature=temperature,
        seed=1,
        end_ids=[EOS_ID],
        batch_size=5,
    )
    return sum(answer == list(row.answer_ids)[:-1] for answer, row in zip(answers, rows, strict=True)) / len(rows)


def test_sft_stops_at_the_target_accuracy_and_writes_the_model(model: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, float]] = []

    def validate(model: PreTrainedModel, step: int, loss: float) -> float:
        calls.append((step, loss))
        return accuracy_of(model, temperature=1.0)

    steps = {"max_steps": 400, "batch_size": 16, "learning_rate": 1e-2, "validate_every": 20}
    config = SftConfig(output=str(tmp_path / "warm"), target_accuracy=0.9, **steps)
    result = train_sft(rows_to_copy(), str(model), config, 0, validate)
    assert result.accuracy is not None and result.accuracy >= 0.9
    assert result.steps == calls[-1][0] < 400
    assert calls[-1][1] < calls[0][1]
    assert accuracy_of(AutoModelForCausalLM.from_pretrained(tmp_path / "warm"), temperature=0.0) >= 0.9
    assert {entry.name for entry in (tmp_path / "warm").iterdir()} == {entry.name for entry in model.iterdir()}


def test_the_same_seed_gives_the_same_model_with_or_without_validation(model: Path, tmp_path: Path) -> None:
    weights = []
    for name, validate in (("one", None), ("two", lambda model, step, loss: accuracy_of(model, 1.0))):
        config = SftConfig(output=str(tmp_path / name), max_steps=6, batch_size=3, validate_every=2)
        result = train_sft(rows_to_copy(), str(model), config, 4, validate)
        assert result.steps == 6
        weights.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_empty_data_and_empty_answers_are_refused(model: Path, tmp_path: Path) -> None:
    config = SftConfig(output=str(tmp_path / "warm"))
    with pytest.raises(DataError, match="no rows"):
        train_sft([], str(model), config, 0)
    with pytest.raises(DataError, match=r"row 1 .* empty prompt or answer"):
        train_sft([SftRow([5], [6]), SftRow([5], [])], str(model), config, 0)
