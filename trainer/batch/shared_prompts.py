"""Concatenates rows so that a prompt of several rows is computed once.

All rows of a micro-batch become one line of T tokens: each shared prompt once, before the first row that has it, and
the rest of every row. Attention runs over S sequences, which follow one another in the line: a shared prompt, a whole
row, or the rest of a row, which also sees its prompt. Only equal prompts are shared. They end before the first loss
token, so every loss token sees exactly its own row.

R sequences of a block, Q queries and K keys of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.protos.types import Segment

Indices = NDArray[np.int64]

_PADDING = 8
"""A sequence joins a block if it lacks at most 1/8 of the longest one's keys, or as many as _LITTLE_PADDING."""
_LITTLE_PADDING = 16
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
    """The column at which the prompt of a row's rest starts."""
    prompt_lengths_S: Indices
    """0 for a shared prompt itself and for a whole row."""
    sequences_B: Indices
    """The sequence that ends each row, in the order of the rows."""

    @classmethod
    def of(cls, rows: Sequence[Segment], device: torch.device) -> SharedPrompts:
        """The rows in their order; at least one."""
        prompts = [row.ids[: row.num_prompt_tokens].tobytes() for row in rows]
        counts = Counter(prompts)
        firsts: dict[bytes, int] = {}
        parts: list[NDArray[np.int32]] = []
        sequences: list[tuple[int, int, int]] = []
        last: list[int] = []
        end = 0
        for row, prompt in zip(rows, prompts, strict=True):
            size = row.num_prompt_tokens if counts[prompt] > 1 else 0
            if size and prompt not in firsts:
                firsts[prompt] = end
                parts.append(row.ids[:size])
                sequences.append((size, 0, 0))
                end += size
            last.append(len(sequences))
            parts.append(row.ids[size:])
            sequences.append((len(row.ids) - size, firsts.get(prompt, 0), size))
            end += len(row.ids) - size
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

    def columns(self, row: int, positions: NDArray[np.intp]) -> Indices:
        """The columns of the line that hold these positions of a row."""
        s = self.sequences_B[row]
        size = self.prompt_lengths_S[s]
        found: Indices = np.where(positions < size, self.prompts_S[s], self.starts_S[s] - size) + positions
        return found

    def _key_columns(self, s: int) -> Indices:
        """The columns that a sequence's last token sees."""
        prompt = np.arange(self.prompt_lengths_S[s]) + self.prompts_S[s]
        return np.concatenate([prompt, np.arange(self.lengths_S[s]) + self.starts_S[s]])

    @cached_property
    def attention(self) -> BlockAttention:
        """The sequences as blocks of similar numbers of keys, for attention over rectangles."""
        keys = [self._key_columns(s) for s in range(len(self.lengths_S))]
        places_T = np.zeros(len(self.ids_T), np.int64)
        blocks = []
        end = 0
        for members in self._blocks():
            num_queries, num_keys = max(self.lengths_S[members]), max(len(keys[s]) for s in members)
            last_R1 = (self.lengths_S[members] - 1)[:, None]
            queries_RQ = np.minimum(np.arange(num_queries), last_R1)
            keys_RK = np.stack([keys[s][np.minimum(np.arange(num_keys), len(keys[s]) - 1)] for s in members])
            for number, s in enumerate(members):
                own = np.arange(self.lengths_S[s])
                places_T[self.starts_S[s] + own] = end + number * num_queries + own
            end += len(members) * num_queries
            blocks.append(
                AttentionBlock(
                    queries_RQ=self._tensor(queries_RQ + self.starts_S[members][:, None]),
                    keys_RK=self._tensor(keys_RK),
                    positions_RQ=self._tensor(queries_RQ + self.prompt_lengths_S[members][:, None]),
                    has_prompts=bool(self.prompt_lengths_S[members].any()),
                )
            )
        return BlockAttention(tuple(blocks), self._tensor(places_T))

    def _blocks(self) -> list[list[int]]:
        """The sequences of each block. Those that see a prompt need a mask and are apart from the others."""
        sizes_S, has_prompt_S = self.prompt_lengths_S + self.lengths_S, self.prompt_lengths_S > 0
        blocks: list[list[int]] = []
        for s in np.lexsort((-sizes_S, has_prompt_S)).tolist():
            first = blocks[-1][0] if blocks else s
            most = max(_LITTLE_PADDING, sizes_S[first] // _PADDING)
            if blocks and has_prompt_S[first] == has_prompt_S[s] and sizes_S[first] - sizes_S[s] <= most:
                blocks[-1].append(s)
            else:
                blocks.append([s])
        return blocks

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


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Sequences with the same numbers of queries and keys. The last one of a shorter sequence is repeated."""

    queries_RQ: Tensor
    """Columns of the line."""
    keys_RK: Tensor
    positions_RQ: Tensor
    """Each query's position in its row. Key k has position k."""
    has_prompts: bool
    """Without prompts, queries and keys are the same tokens."""
    _masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """(R, 1, Q, K), 0 where a query sees a key, else −∞. A window of w is the token and the w − 1 before it."""
        if (kept := self._masks.get((window, dtype))) is not None:
            return kept
        positions_K = torch.arange(self.keys_RK.shape[1], device=self.keys_RK.device)
        hidden_RQK = positions_K > self.positions_RQ[:, :, None]
        if window is not None:
            hidden_RQK |= positions_K <= self.positions_RQ[:, :, None] - window
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
