"""Supervised fine-tuning on given answers before reinforcement learning. Plain torch, one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, takewhile
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import transformers

from tandem.protos.errors import DataError
from tandem.protos.types import Segment
from tandem.trainer.batch.micro_batch import TrainingRow, stack
from tandem.trainer.checkpoints.export import write_export
from tandem.trainer.config import SftConfig
from tandem.trainer.models.loading import load_model, model_folder
from tandem.trainer.models.token_model import token_logprobs

_GRADIENT_CLIP = 1.0
_WARMUP_FRACTION = 0.05
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SftRow:
    """A prompt and its target answer as token ids; the answer includes the end token."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SftResult:
    """`loss`: nats per token, mean over the last `validate_every` steps. `accuracy`: of the last validation, if any."""

    steps: int
    loss: float
    accuracy: float | None


Validate = Callable[[transformers.PreTrainedModel, int, float], float | None]
"""(model, step, mean loss since the last call) → accuracy, or None if it does not measure one."""


def train_sft(
    rows: Sequence[SftRow], model_path: str, config: SftConfig, seed: int, on_validate: Validate | None = None
) -> SftResult:
    """Trains the model of `model_path` on the answers of `rows`, in float32, and writes it to `config.output`.

    Calls `on_validate` every `validate_every` steps and after the last. Uses the GPU if there is one, and torch's
    current number of threads. Raises DataError if there are no rows, or a row has an empty prompt or answer; ModelError
    if the model cannot be loaded; EnvironmentLackError if the disk is full.
    """
    source = model_folder(model_path)
    segments = [_segment(row, number) for number, row in enumerate(rows)]
    if not segments:
        raise DataError("supervised training got no rows: set sft.train_file to a file whose rows have an answer")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else _CPU
    model = load_model(source, "float32").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=True)
    losses: list[float] = []
    accuracy: float | None = None
    for step, batch in enumerate(_batches(segments, config, seed), 1):
        rate = config.learning_rate * min(1.0, step / max(1.0, _WARMUP_FRACTION * config.max_steps))
        losses.append(_step(model, optimizer, batch, rate, device))
        if step % config.validate_every == 0 or step == config.max_steps:
            losses = losses[-config.validate_every :]
            accuracy = on_validate(model, step, fmean(losses)) if on_validate else None
            if accuracy is not None and 0 < config.target_accuracy <= accuracy:
                break
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    write_export(model, weights, source, Path(config.output))
    return SftResult(step, fmean(losses), accuracy)


@torch.no_grad()
def sample_answers(
    model: transformers.PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    end_ids: Sequence[int],
    batch_size: int = 256,
) -> list[list[int]]:
    """One answer per prompt as token ids, without its end token; temperature 0 is greedy. Slow, but needs no engine."""
    device = next(model.parameters()).device
    settings = transformers.GenerationConfig(
        max_new_tokens=max_tokens,
        do_sample=temperature > 0,
        eos_token_id=list(end_ids),
        pad_token_id=end_ids[0],
        **({"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}),
    )
    answers: list[list[int]] = []
    was_training = model.training
    model.eval()
    with torch.random.fork_rng():  # sampling does not change the training's random state
        torch.manual_seed(seed)
        for first in range(0, len(prompts), batch_size):
            part = prompts[first : first + batch_size]
            longest = max(map(len, part))
            ids = torch.tensor([[end_ids[0]] * (longest - len(ids)) + list(ids) for ids in part], device=device)
            mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in part], device=device)
            generated = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
            for answer in generated[:, longest:].tolist():
                answers.append(list(takewhile(lambda token: token not in end_ids, answer)))
    model.train(was_training)
    return answers


def _segment(row: SftRow, number: int) -> Segment:
    if not len(row.prompt_ids) or not len(row.answer_ids):
        raise DataError(f"row {number} of the supervised data has an empty prompt or answer")
    ids = np.array([*row.prompt_ids, *row.answer_ids], np.int32)
    loss_mask = np.zeros(len(ids), np.uint8)
    loss_mask[len(row.prompt_ids) :] = 1
    return Segment(ids, np.zeros(len(ids), np.float32), loss_mask, ())


def _batches(segments: Sequence[Segment], config: SftConfig, seed: int) -> Iterator[list[Segment]]:
    """`max_steps` batches from repeated passes over the rows, reshuffled for each pass."""
    random = np.random.default_rng(seed)
    numbers = chain.from_iterable(random.permutation(len(segments)) for _ in count())
    for _ in range(config.max_steps):
        yield [segments[number] for number in islice(numbers, config.batch_size)]


def _step(
    model: transformers.PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    segments: Sequence[Segment],
    rate: float,
    device: torch.device,
) -> float:
    batch = stack([TrainingRow(segment) for segment in segments], device)
    loss = -token_logprobs(model, batch).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_CLIP)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())
