"""Running sums within rows of different lengths, as matrix products instead of loops over tokens, rows or columns.

Rows are cut into blocks of w tokens; zeros fill the last block of a row (at most w − 1 per row). The sums within M
blocks are one product of (M, w) with a triangular (w, w) matrix. Each block then needs the total carried over from its
neighbour, which is the same problem on M numbers instead of N. Sums never leave their row, so a large number in one row
costs no precision in another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.trainer.batch.ragged import spread

BLOCK = 32
"""w: longer blocks mean more multiplications, shorter ones more passes."""


def discounted_sums(values_N: Tensor, lengths_R: Tensor, decay: float) -> Tensor:
    """Σ_{s ≥ t} decay^(s−t)·x_s over the tokens s of t's row, (N,) float64. Decay 0 gives the values themselves (0⁰ =
    1).
    """
    return _scan(values_N, lengths_R, decay, backward=True)


def running_sums(values_N: Tensor, lengths_R: Tensor) -> Tensor:
    """Σ_{s ≤ t} x_s over the tokens s of t's row, (N,) float64."""
    return _scan(values_N, lengths_R, 1.0, backward=False)


def _scan(values_N: Tensor, lengths_R: Tensor, decay: float, *, backward: bool) -> Tensor:
    assert values_N.ndim == 1 and values_N.dtype == torch.float64, (values_N.shape, values_N.dtype)
    if not len(values_N):
        return values_N.clone()
    longest = int(lengths_R.max())
    width = min(BLOCK, longest)
    blocks = _Blocks.of(lengths_R, width)
    place_w = torch.arange(width, dtype=torch.float64, device=values_N.device)
    ahead_ww = place_w[:, None] - place_w if backward else place_w - place_w[:, None]
    powers_ww = (decay ** ahead_ww.clamp(min=0)).masked_fill_(ahead_ww < 0, 0.0)
    sums_Mw = blocks.cut(values_N).mm(powers_ww)
    if longest > width:
        totals_M = _scan(
            sums_Mw[:, 0 if backward else -1].contiguous(), blocks.counts_R, decay**width, backward=backward
        )
        steps_w = width - place_w if backward else place_w + 1
        sums_Mw.addcmul_(blocks.neighbours(totals_M, backward=backward)[:, None], decay**steps_w)
    return blocks.join(sums_Mw)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The cut of rows into blocks: `counts_R` blocks of `width` tokens for each row. `places_N` is where each token
    goes, or None if all blocks are full.
    """

    width: int
    counts_R: Tensor
    places_N: Tensor | None

    @classmethod
    def of(cls, lengths_R: Tensor, width: int) -> _Blocks:
        counts_R = (lengths_R + (width - 1)) // width
        fill_R = counts_R * width - lengths_R
        if not bool(fill_R.any()):
            return cls(width, counts_R, None)
        places_N = spread(fill_R.cumsum(0) - fill_R, lengths_R)
        places_N += torch.arange(len(places_N), device=places_N.device)
        return cls(width, counts_R, places_N)

    def cut(self, values_N: Tensor) -> Tensor:
        if self.places_N is None:
            return values_N.view(-1, self.width)
        filled = values_N.new_zeros(int(self.counts_R.sum()) * self.width)
        return filled.index_copy_(0, self.places_N, values_N).view(-1, self.width)

    def join(self, values_Mw: Tensor) -> Tensor:
        values = values_Mw.view(-1)
        return values if self.places_N is None else values.index_select(0, self.places_N)

    def neighbours(self, totals_M: Tensor, *, backward: bool) -> Tensor:
        """The value of each block's successor in its row (predecessor if not `backward`), 0 at the row's end."""
        ends_R = self.counts_R.cumsum(0)
        carry_M = torch.roll(totals_M, -1 if backward else 1)
        edges_R = ends_R - 1 if backward else ends_R - self.counts_R
        carry_M[edges_R[self.counts_R > 0]] = 0.0
        return carry_M
