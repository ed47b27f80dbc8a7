"""Supervised warm start: imitate given answers before reinforcement learning begins. Plain torch, one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from tandem.protos.errors import DataError
from tandem.protos.types import Segment
from tandem.trainer.batch.micro_batch import TrainingRow, stack
from tandem.trainer.checkpoints.export import write_export
from tandem.trainer.models.loading import load_model, model_folder
from tandem.trainer.models.token_model import token_logprobs

_GRADIENT_CLIP = 1.0
_WARMUP_FRACTION = 0.05
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SftRow:
    """A prompt and the answer to imitate, as token ids; the answer includes its end token."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SftSettings:
    """How to imitate. Learning rate: linear warm-up over a twentieth of `max_steps`, then constant. Float32
    throughout.
    """

    max_steps: int
    batch_size: int
    learning_rate: float
    seed: int = 0
    target_accuracy: float = 0.0
    """Stop once a validation reaches this; 0 takes all steps."""
    validate_every: int = 100


@dataclass(frozen=True, slots=True)
class SftResult:
    """`loss`: nats a token, mean over the last `validate_every` steps. `accuracy`: the last validation's, None without
    one.
    """

    steps: int
    loss: float
    accuracy: float | None


Validate = Callable[[transformers.PreTrainedModel, int, float], float | None]
"""(model, step, mean loss since the last call) → accuracy, or None if it only watches."""


def train_sft(
    rows: Sequence[SftRow], model_path: str, output: Path, settings: SftSettings, on_validate: Validate | None = None
) -> SftResult:
    """Trains the model of `model_path` on the answers of `rows` and writes it to the folder `output`.

    Every `validate_every` steps, and after the last, `on_validate` is called. Uses the device there is, and torch's
    threads as set.

    Raises:
        DataError: there are no rows, or an empty prompt or answer among them.
        ModelError: the model cannot be loaded.
        EnvironmentLackError: the disk is full.
    """
    source = model_folder(model_path)
    segments = [_segment(row, number) for number, row in enumerate(rows)]
    if not segments:
        raise DataError("supervised training got no rows: set sft.train_file to a file whose rows have an answer")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else _CPU
    model = load_model(source, "float32").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    losses: list[float] = []
    accuracy: float | None = None
    for step, batch in enumerate(_batches(segments, settings), 1):
        rate = settings.learning_rate * min(1.0, step / max(1.0, _WARMUP_FRACTION * settings.max_steps))
        losses.append(_step(model, optimizer, batch, rate, device))
        if step % settings.validate_every == 0 or step == settings.max_steps:
            losses = losses[-settings.validate_every :]
            accuracy = on_validate(model, step, sum(losses) / len(losses)) if on_validate else None
            if accuracy is not None and 0 < settings.target_accuracy <= accuracy:
                break
    write_export(model, {name: tensor.detach() for name, tensor in model.named_parameters()}, source, Path(output))
    return SftResult(step, sum(losses) / len(losses), accuracy)


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
    """One answer a prompt as token ids, without its end token; temperature 0 is greedy. Slow, but needs no engine."""
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
    with torch.random.fork_rng():  # the training's own randomness goes on as if nothing had been sampled
        torch.manual_seed(seed)
        for first in range(0, len(prompts), batch_size):
            part = prompts[first : first + batch_size]
            longest = max(map(len, part))
            ids = torch.tensor([[end_ids[0]] * (longest - len(ids)) + list(ids) for ids in part], device=device)
            mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in part], device=device)
            generated = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
            answers += [_until_end(answer, end_ids) for answer in generated[:, longest:].tolist()]
    model.train(was_training)
    return answers


def _until_end(ids: list[int], end_ids: Sequence[int]) -> list[int]:
    ends = [place for place, token in enumerate(ids) if token in end_ids]
    return ids[: ends[0]] if ends else ids


def _segment(row: SftRow, number: int) -> Segment:
    if not len(row.prompt_ids) or not len(row.answer_ids):
        raise DataError(f"row {number} of the supervised data has an empty prompt or answer")
    ids = np.array([*row.prompt_ids, *row.answer_ids], np.int32)
    loss_mask = np.zeros(len(ids), np.uint8)
    loss_mask[len(row.prompt_ids) :] = 1
    return Segment(ids, np.zeros(len(ids), np.float32), loss_mask, ())


def _batches(segments: Sequence[Segment], settings: SftSettings) -> Iterator[list[Segment]]:
    """`max_steps` batches: reshuffled passes over the rows, one after the other."""
    random = np.random.default_rng(settings.seed)
    queue: NDArray[np.int64] = np.empty(0, np.int64)
    for _ in range(settings.max_steps):
        while len(queue) < settings.batch_size:
            queue = np.concatenate([queue, random.permutation(len(segments))])
        yield [segments[number] for number in queue[: settings.batch_size]]
        queue = queue[settings.batch_size :]


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
