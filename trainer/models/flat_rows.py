"""Decides whether rows are concatenated without padding and share prompts, and checks that the models keep such rows
separate.

Some models silently mix such rows: their layers carry state past the end of a row, or their attention ignores
positions. Every model is therefore tested once on two short rows before use. Relative to full mixing, where the second
row continues the first:

- leak: replacing the first row must hardly change the second, though a mixture of experts gives no equal bits.
- apart: the second row must equal the same row in its own line, up to rounding.

With a shared prompt, only the tokens after the prompt are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.protos.errors import ModelError
from tandem.protos.types import Packing, Segment
from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.batch.micro_batch import MicroBatch, TrainingRow, stack
from tandem.trainer.models.shared_attention import SHARED_PROMPTS, why_not_shared
from tandem.trainer.models.varlen_attention import varlen_attention
from tandem.trainer.rank import Rank

log = logging.getLogger(__name__)

_LENGTHS = 8, 12
_PROMPT = 4
_HOW = {"flat": "are packed end to end", "shared": "share a prompt"}
_MOST = {torch.float32: (1e-5, 1e-3)}
_MOST_IN_HALF_PRECISION = 2e-3, 0.25  # rounding may send a token to another expert


class RowPacking:
    """The packings of new batches, and the models' attention for any batch. The same on every rank."""

    packings: tuple[Packing, ...]
    """A batch has the last one if it computes far fewer tokens than with the first (trainer/batch/planning.py)."""

    def __init__(
        self, wanted: Literal["auto", "padded", "flat", "shared"], engines: Sequence[TrainingEngine], rank: Rank
    ) -> None:
        """`auto` is flat if every model has variable-length attention and keeps rows separate, else padded, and shares
        prompts if every model can. All ranks must call it. Raises ModelError if `flat` or `shared` is required and a
        model mixes rows, or a model cannot run concatenated rows at all.
        """
        self._engines, self._rank = engines, rank
        self._separate: list[str] = [engine.module.config._attn_implementation for engine in engines]
        self._used: Sequence[str] = self._separate
        self._checked: set[Packing] = {"padded"}
        if wanted != "padded":
            found = [varlen_attention(engine.module, rank.device, engine.dtype) for engine in engines]
            if wanted == "flat" or rank.all_agree(None not in found):
                self._use_flat(found, is_required=wanted == "flat")
        base: Packing = "flat" if "flat" in self._checked else "padded"
        self.packings = (base,)
        if wanted == "shared":
            self.use("shared")
            self.packings = ("shared",)
        elif wanted == "auto" and self._shares():
            self.packings = (base, "shared")

    def use(self, packing: Packing) -> None:
        """Sets the models' attention for a batch. All ranks must call it. Raises ModelError, on every rank, if a model
        mixes such rows or cannot run them.
        """
        if packing not in self._checked:
            self._set(self._separate)
            if packing == "shared":
                self._check_shared()
            check_row_separation(self._engines, self._rank, packing)
            self._checked.add(packing)
        self._set([SHARED_PROMPTS] * len(self._engines) if packing == "shared" else self._separate)

    def _use_flat(self, found: Sequence[str | None], *, is_required: bool) -> None:
        before = self._separate
        self._separate = [name or old for name, old in zip(found, before, strict=True)]
        self._set(self._separate)
        try:
            self.use("flat")
        except ModelError as error:
            if is_required:
                raise
            self._separate = before
            self._set(before)
            if self._rank.rank == 0:
                log.warning("rows are padded, because they cannot be packed end to end: %s", error)

    def _check_shared(self) -> None:
        for engine, attention in zip(self._engines, self._separate, strict=True):
            reason = why_not_shared(engine.module, attention)
            if not self._rank.all_agree(reason is None):
                raise ModelError(
                    f'{type(engine.module).__name__} cannot share prompts ({reason}): set trainer.packing = "padded"'
                )

    def _shares(self) -> bool:
        try:
            self.use("shared")
        except ModelError as error:
            if self._rank.rank == 0:
                log.warning("rows are packed as %s, because prompts cannot be shared: %s", self.packings[0], error)
            return False
        return True

    def _set(self, names: Sequence[str]) -> None:
        if names != self._used:
            _set_attention(self._engines, names)
            self._used = names


class _MixingError(ModelError):
    """The model runs concatenated rows but mixes them."""


def check_row_separation(engines: Sequence[TrainingEngine], rank: Rank, packing: Packing = "flat") -> None:
    """Raises ModelError, on every rank, if a model mixes rows packed in this way or cannot run them."""
    for engine in engines:
        leak, apart = measure_row_mixing(engine, rank.device, packing)
        most_leak, most_apart = _MOST.get(engine.dtype, _MOST_IN_HALF_PRECISION)
        if not rank.all_agree(leak <= most_leak and apart <= most_apart):
            raise _MixingError(
                f"{type(engine.module).__name__} does not keep rows apart that {_HOW[packing]} (leak {leak:.1g} "
                f"of at most {most_leak:.1g}, {apart:.1g} of at most {most_apart:.1g} from the padded row): "
                'set trainer.packing = "padded"'
            )


@torch.no_grad()
def measure_row_mixing(engine: TrainingEngine, device: torch.device, packing: Packing = "flat") -> tuple[float, float]:
    """(leak, apart) of the engine's model; NaN if it cannot be measured. All ranks must call it. Raises ModelError if
    the model cannot run rows packed in this way. The model's attention stays as it is.
    """
    size = _PROMPT if packing == "shared" else 0
    first, second, other = (_row(engine, n, length, size) for n, length in enumerate((*_LENGTHS, _LENGTHS[0])))
    joined = TrainingRow(_segment(np.concatenate([first.segment.ids, second.segment.ids[size:]])))
    rest = _LENGTHS[1] - size
    compared = rest - (packing == "shared")  # whose line ends before the last token
    attention = engine.module.config._attn_implementation
    alone_TH = _hidden(engine, stack([first, second], device))[1, -rest:][:compared]
    continued_TH = _hidden(engine, stack([joined], device))[0, -rest:][:compared]
    try:
        if packing == "shared":
            _set_attention([engine], [SHARED_PROMPTS])
        packed_TH = _hidden(engine, stack([first, second], device, packing=packing))[0, -compared:]
        after_other_TH = _hidden(engine, stack([other, second], device, packing=packing))[0, -compared:]
    except (TypeError, ValueError, RuntimeError) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{type(engine.module).__name__} cannot run rows that {_HOW[packing]} ({what}); "
            'set trainer.packing = "padded"'
        ) from error
    finally:
        if packing == "shared":
            _set_attention([engine], [attention])
    scale = _largest(continued_TH - alone_TH)
    return float(_largest(packed_TH - after_other_TH) / scale), float(_largest(packed_TH - alone_TH) / scale)


def _set_attention(engines: Sequence[TrainingEngine], names: Sequence[str]) -> None:
    for engine, name in zip(engines, names, strict=True):
        engine.module.set_attn_implementation(name)


def _row(engine: TrainingEngine, number: int, length: int, prompt_size: int) -> TrainingRow:
    """Different tokens for each number, except in the prompt."""
    vocabulary = engine.module.config.get_text_config().vocab_size
    places = np.arange(length)
    ids = places + 3 + np.where(places < prompt_size, 0, number * max(_LENGTHS))
    return TrainingRow(_segment(ids % vocabulary, prompt_size))


def _segment(ids: NDArray[np.generic], prompt_size: int = 0) -> Segment:
    loss_mask = (np.arange(len(ids)) >= max(1, prompt_size)).astype(np.uint8)
    return Segment(ids.astype(np.int32), np.zeros(len(ids), np.float32), loss_mask, ())


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
