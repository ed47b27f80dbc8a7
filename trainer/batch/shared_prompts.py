"""Concatenates rows so that a prompt of several rows is computed once, and so are rows with the same tokens.

All rows of a micro-batch become one line of T tokens: each shared prompt once, before the first row that has it, and
the rest of every row up to its last loss token, which predicts nothing. The line consists of S sequences: a shared
prompt, a whole row, or the rest of a row, which also sees its prompt. Only equal prompts are shared. They end before
the first loss token, so every loss token sees exactly its own row. Rests of one prompt that are equal are one sequence:
short answers often are, and the gradients of their tokens add up there.

R squares of a block, Q queries and K keys of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.protos.types import Segment

Indices = NDArray[np.int64]

_PADDING = 8
"""A square joins a block if it lacks at most 1/8 of the largest one's keys, or as many as _LITTLE_PADDING."""
_LITTLE_PADDING = 16
_SQUARE_COST = 512
"""Attention of a further square takes as long as so many more pairs of a query and a key."""
_HIDDEN = np.iinfo(np.int64).max
"""Position of a key that no query sees."""
_MOST_KEPT_ELEMENTS = 1 << 20
"""Elements of a mask that all layers use; a larger one is made again, which costs little beside its attention."""


@dataclass(frozen=True)
class SharedPrompts:
    """The line of a micro-batch and its sequences. The arrays are on the CPU, the tensors on `device`."""

    device: torch.device
    ids_T: Indices
    lengths_S: Indices
    """Number of tokens in the line."""
    prompts_S: Indices
    """The column at which the prompt of a row's rest starts; for a shared prompt or a whole row, where itself does."""
    prompt_lengths_S: Indices
    """0 for a shared prompt itself and for a whole row."""
    sequences_B: Indices
    """The sequence that ends each row, in the order of the rows."""

    @classmethod
    def of(cls, rows: Sequence[Segment], device: torch.device) -> SharedPrompts:
        """The rows in their order; at least one."""
        sizes = [row.num_prompt_tokens for row in rows]
        prompts = [row.ids[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
        counts = Counter(prompts)
        known: dict[tuple[bytes, bytes], int] = {}  # the sequence of a prompt and the rest after it
        parts: list[NDArray[np.int32]] = []
        sequences: list[tuple[int, int, int]] = []
        last: list[int] = []
        end = 0
        for row, prompt, prompt_size in zip(rows, prompts, sizes, strict=True):
            size = prompt_size if counts[prompt] > 1 else 0
            if size and (prompt, b"") not in known:
                known[prompt, b""] = len(sequences)
                parts.append(row.ids[:size])
                sequences.append((size, end, 0))
                end += size
            rest = row.ids[size : _num_inputs(row)]  # empty if the prompt predicts the only loss token
            key = prompt, rest.tobytes()
            if key not in known:
                known[key] = len(sequences)
                parts.append(rest)
                sequences.append((len(rest), sequences[known[prompt, b""]][1] if size else end, size))
                end += len(rest)
            last.append(known[key])
        ids_T = np.concatenate(parts).astype(np.int64)
        lengths_S, prompts_S, prompt_lengths_S = np.array(sequences, np.int64).T
        return cls(device, ids_T, lengths_S, prompts_S, prompt_lengths_S, np.array(last))

    @cached_property
    def starts_S(self) -> Indices:
        """The column at which each sequence starts."""
        return np.cumsum(self.lengths_S) - self.lengths_S

    @cached_property
    def positions_BT(self) -> Tensor:
        """Each token's position in its own row; one line."""
        first_S = self.starts_S - self.prompt_lengths_S
        positions_T = np.arange(len(self.ids_T)) - np.repeat(first_S, self.lengths_S)
        return self._tensor(positions_T[None])

    def columns(self, rows: int | Indices, positions: NDArray[np.intp]) -> Indices:
        """The columns of the line that hold these positions of a row, or of as many rows."""
        s = self.sequences_B[rows]
        size = self.prompt_lengths_S[s]
        found: Indices = np.where(positions < size, self.prompts_S[s], self.starts_S[s] - size) + positions
        return found

    def _key_columns(self, s: int) -> Indices:
        """The columns that a sequence's last token sees."""
        prompt = np.arange(self.prompt_lengths_S[s]) + self.prompts_S[s]
        return np.concatenate([prompt, np.arange(self.lengths_S[s]) + self.starts_S[s]])

    @cached_property
    def attention(self) -> BlockAttention:
        """The sequences as blocks of similar squares, for attention over rectangles."""
        places_T = np.zeros(len(self.ids_T), np.int64)
        blocks = []
        end = 0
        for squares in self._blocks():
            rows = [self._square(square) for square in squares]
            num_queries, num_keys = (max(len(row[side].columns) for row in rows) for side in (0, 1))
            for number, (queries, _) in enumerate(rows):
                places_T[queries.columns] = end + number * num_queries + np.arange(len(queries.columns))
            end += len(rows) * num_queries
            blocks.append(
                AttentionBlock(
                    queries=_stacked([queries for queries, _ in rows], num_queries, self.device),
                    keys=_stacked([keys for _, keys in rows], num_keys, self.device, hides_padding=True),
                    is_causal=not self.prompt_lengths_S[squares[0]].any(),
                )
            )
        return BlockAttention(tuple(blocks), self._tensor(places_T))

    def _square(self, square: Sequence[int]) -> tuple[_Tokens, _Tokens]:
        """The queries and keys of sequences that are computed together: a prompt and all its rests, or one sequence."""
        own = [np.arange(self.lengths_S[s]) for s in square]
        queries = _Tokens(
            columns=np.concatenate([self.starts_S[s] + each for s, each in zip(square, own, strict=True)]),
            positions=np.concatenate([self.prompt_lengths_S[s] + each for s, each in zip(square, own, strict=True)]),
            rests=np.repeat(np.where(self.prompt_lengths_S[square] > 0, square, -1), self.lengths_S[square]),
        )
        size = self.prompt_lengths_S[square[0]]
        if not size:
            return queries, queries
        prompt = _Tokens(np.arange(size) + self.prompts_S[square[0]], np.arange(size), np.full(size, -1))
        return queries, _Tokens(*(np.concatenate(pair) for pair in zip(prompt, queries, strict=True)))

    def _squares(self) -> list[list[int]]:
        """The sequences that are computed together. A prompt and its rests are, if their square costs less than
        attention of each by itself.
        """
        squares: list[list[int]] = []
        families: dict[int, list[int]] = {}
        for s, start in enumerate(self.prompts_S.tolist()):
            families.setdefault(start, []).append(s)
        for family in families.values():
            lengths = self.lengths_S[family]
            apart = lengths * (lengths + self.prompt_lengths_S[family]) + _SQUARE_COST
            together = lengths.sum() ** 2 + _SQUARE_COST
            squares += [family] if together <= apart.sum() else [[s] for s in family]
        return squares

    def _blocks(self) -> list[list[list[int]]]:
        """The squares of each block. Those of one kind are together: whole prompts and rows, rests, families."""
        squares = self._squares()
        sizes = [int(self.prompt_lengths_S[one[0]] + self.lengths_S[one].sum()) for one in squares]
        kinds = [2 if len(one) > 1 else int(self.prompt_lengths_S[one[0]] > 0) for one in squares]
        blocks: list[list[int]] = []
        for number in sorted(range(len(squares)), key=lambda number: (kinds[number], -sizes[number])):
            first = blocks[-1][0] if blocks else number
            most = max(_LITTLE_PADDING, sizes[first] // _PADDING)
            if blocks and kinds[first] == kinds[number] and sizes[first] - sizes[number] <= most:
                blocks[-1].append(number)
            else:
                blocks.append([number])
        return [[squares[number] for number in block] for block in blocks]

    @cached_property
    def varlen(self) -> VarlenAttention:
        """The sequences end to end, for variable-length attention."""
        sizes_S = self.prompt_lengths_S + self.lengths_S
        return VarlenAttention(
            keys=self._tensor(np.concatenate([self._key_columns(s) for s in range(len(sizes_S))])),
            query_ends=self._tensor(np.cumsum([0, *self.lengths_S]).astype(np.int32)),
            key_ends=self._tensor(np.cumsum([0, *sizes_S]).astype(np.int32)),
            most_queries=int(max(self.lengths_S)),
            most_keys=int(max(sizes_S)),
        )

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


class _Tokens(NamedTuple):
    """Some tokens of the line."""

    columns: Indices
    positions: Indices
    """In their rows."""
    rests: Indices
    """The sequence of a row's rest that shares its square with others; −1 for tokens that all later ones see."""


@dataclass(frozen=True, slots=True)
class BlockTokens:
    """The queries or the keys of a block, (R, Q) or (R, K). The last one of a smaller square is repeated."""

    columns: Tensor
    positions: Tensor
    rests: Tensor


def _stacked(rows: Sequence[_Tokens], size: int, device: torch.device, *, hides_padding: bool = False) -> BlockTokens:
    places = [np.minimum(np.arange(size), len(row.columns) - 1) for row in rows]
    columns, positions, rests = (
        np.stack([row[part][place] for row, place in zip(rows, places, strict=True)]) for part in range(3)
    )
    if hides_padding:
        for number, row in enumerate(rows):
            positions[number, len(row.columns) :] = _HIDDEN
    return BlockTokens(*(torch.from_numpy(each).to(device) for each in (columns, positions, rests)))


def _num_inputs(row: Segment) -> int:
    """The number of tokens before the last loss token; all if there is none."""
    last = row.loss_mask.tobytes().rfind(1)
    return len(row.ids) if last < 0 else last


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Squares with the same numbers of queries and keys."""

    queries: BlockTokens
    keys: BlockTokens
    is_causal: bool
    """Queries and keys are the same tokens, and each query sees all keys before it."""
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(R, 1, Q, K), 0 where a query sees a key, else −∞. A window of w is the token and the w − 1 before it."""
        if (kept := self._masks.get((window, dtype))) is not None:
            return kept
        positions_RQ1, positions_R1K = self.queries.positions[:, :, None], self.keys.positions[:, None]
        rests_R1K = self.keys.rests[:, None]
        hidden_RQK = positions_R1K > positions_RQ1
        hidden_RQK |= (rests_R1K >= 0) & (rests_R1K != self.queries.rests[:, :, None])
        if window is not None:
            hidden_RQK |= positions_R1K <= positions_RQ1 - window
        mask_RQK = torch.zeros(hidden_RQK.shape, dtype=dtype, device=hidden_RQK.device)
        mask = mask_RQK.masked_fill_(hidden_RQK, -torch.inf)[:, None]
        if mask.numel() <= _MOST_KEPT_ELEMENTS:
            self._masks[window, dtype] = mask
        return mask


@dataclass(frozen=True, slots=True)
class BlockAttention:
    blocks: tuple[AttentionBlock, ...]
    places_T: Tensor
    """Where each token is among the queries of all blocks."""


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """Queries are the tokens of the line in their order."""

    keys: Tensor
    """The columns of all sequences' keys."""
    query_ends: Tensor
    """int32: 0, then the end of each sequence's queries."""
    key_ends: Tensor
    most_queries: int
    most_keys: int
