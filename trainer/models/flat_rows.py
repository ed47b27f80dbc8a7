"""Decides whether rows are concatenated without padding, and checks that the models keep such rows separate.

Some models silently mix such rows: their layers carry state past the end of a row, or their attention ignores
positions. Every model is therefore tested once on two short rows before use. Relative to full mixing, where the second
row continues the first:

- leak: replacing the first row must hardly change the second, though a mixture of experts gives no equal bits.
- apart: the second row must equal the same row in its own line, up to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tandem.protos.errors import ModelError
from tandem.protos.types import Packing, Segment
from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.batch.micro_batch import MicroBatch, TrainingRow, stack
from tandem.trainer.models.varlen_attention import varlen_attention
from tandem.trainer.rank import Rank

log = logging.getLogger(__name__)

_LENGTHS = 8, 12
_MOST = {torch.float32: (1e-5, 1e-3)}
_MOST_IN_HALF_PRECISION = 2e-3, 0.25  # rounding may send a token to another expert


def choose_packing(wanted: Literal["auto", "padded", "flat"], engines: Sequence[TrainingEngine], rank: Rank) -> Packing:
    """The packing of new batches, the same on every rank. Sets the models' attention accordingly.

    `auto` is flat if every model has variable-length attention and keeps rows separate. All ranks must call it. Raises
    ModelError if `flat` is required and a model mixes rows, or a model cannot run concatenated rows at all.
    """
    if wanted == "padded":
        return "padded"
    found = [varlen_attention(engine.module, rank.device, engine.dtype) for engine in engines]
    if wanted == "auto" and not rank.all_agree(None not in found):
        return "padded"
    before = [engine.module.config._attn_implementation for engine in engines]
    _set_attention(engines, found)
    try:
        check_row_separation(engines, rank)
    except _MixingError as error:
        if wanted == "flat":
            raise
        _set_attention(engines, before)
        if rank.rank == 0:
            log.warning("rows are padded: %s", error)
        return "padded"
    return "flat"


class _MixingError(ModelError):
    """The model runs concatenated rows but mixes them."""


def check_row_separation(engines: Sequence[TrainingEngine], rank: Rank) -> None:
    """Raises ModelError, on every rank, if a model mixes concatenated rows or cannot run them."""
    for engine in engines:
        leak, apart = measure_row_mixing(engine, rank.device)
        most_leak, most_apart = _MOST.get(engine.dtype, _MOST_IN_HALF_PRECISION)
        if not rank.all_agree(leak <= most_leak and apart <= most_apart):
            raise _MixingError(
                f"{type(engine.module).__name__} does not keep rows apart that are packed end to end (leak {leak:.1g} "
                f"of at most {most_leak:.1g}, {apart:.1g} of at most {most_apart:.1g} from the padded row): "
                'set trainer.packing = "padded"'
            )


@torch.no_grad()
def measure_row_mixing(engine: TrainingEngine, device: torch.device) -> tuple[float, float]:
    """(leak, apart) of the engine's model; NaN if it cannot be measured. All ranks must call it. Raises ModelError if
    the model cannot run concatenated rows.
    """
    first, second, other = (_row(engine, number, length) for number, length in enumerate((*_LENGTHS, _LENGTHS[0])))
    joined = TrainingRow(_segment(np.concatenate([first.segment.ids, second.segment.ids])))
    alone_TH = _hidden(engine, stack([first, second], device))[1]
    continued_TH = _hidden(engine, stack([joined], device))[0, _LENGTHS[0] :]
    try:
        flat_TH = _hidden(engine, stack([first, second], device, packing="flat"))[0, _LENGTHS[0] :]
        after_other_TH = _hidden(engine, stack([other, second], device, packing="flat"))[0, _LENGTHS[0] :]
    except (TypeError, ValueError, RuntimeError) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{type(engine.module).__name__} cannot run rows that are packed end to end ({what}); "
            'set trainer.packing = "padded"'
        ) from error
    scale = _largest(continued_TH - alone_TH)
    return float(_largest(flat_TH - after_other_TH) / scale), float(_largest(flat_TH - alone_TH) / scale)


def _set_attention(engines: Sequence[TrainingEngine], names: Sequence[str | None]) -> None:
    for engine, name in zip(engines, names, strict=True):
        if name is not None:
            engine.module.set_attn_implementation(name)


def _row(engine: TrainingEngine, number: int, length: int) -> TrainingRow:
    vocabulary = engine.module.config.get_text_config().vocab_size
    return TrainingRow(_segment((np.arange(length) + 3 + number * max(_LENGTHS)) % vocabulary))


def _segment(ids: Any) -> Segment:
    return Segment(ids.astype(np.int32), np.zeros(len(ids), np.float32), np.zeros(len(ids), np.uint8), ())


def _hidden(engine: TrainingEngine, batch: MicroBatch) -> Tensor:
    """The last hidden states; logits would not do, because the weights of a head may be 0."""
    kept: list[Tensor] = []
    hook = engine.module.base_model.register_forward_hook(lambda module, inputs, output: kept.append(output[0]))
    try:
        engine(**batch.inputs, use_cache=False)
    finally:
        hook.remove()
    return kept[0].float()


def _largest(states_TH: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(states_TH, dim=-1).max()
    return largest
