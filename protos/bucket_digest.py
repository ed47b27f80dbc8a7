"""Digests of buckets, computed while the bytes arrive or are copied: `xxh3`, and what `sums`, which is in
weight_group.py because it also works on a GPU, does in host memory.

A digest detects faults (a truncated, swapped, stale or damaged bucket), not an adversary: a weight group uses the
trusted network of the run.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

DIGEST_BYTES = 32
COLUMNS = 1024
_ROWS_AT_ONCE = 64  # 512 KiB stays in the cache of a core


class BucketDigest(Protocol):
    """The digest of a bucket."""

    def advance(self, num_bytes: int) -> None:
        """Reads what it has not read of the first `num_bytes` bytes, which have their final values."""

    def finish(self) -> bytes:
        """Reads the rest and returns the digest, of `DIGEST_BYTES`."""


class Xxh3Digest:
    """The 128-bit XXH3 hash of the bytes (https://xxhash.com), followed by zeros. In host memory it takes less time
    than sums (benchmarks/weight_transfer.py).
    """

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data.data
        self._hash = xxhash.xxh3_128()
        self._next = 0

    def advance(self, num_bytes: int) -> None:
        self._hash.update(self._data[self._next : num_bytes])
        self._next = max(self._next, min(num_bytes, len(self._data)))

    def finish(self) -> bytes:
        self.advance(len(self._data))
        return self._hash.digest().ljust(DIGEST_BYTES, b"\0")


def sum_rows(table_RC: NDArray[np.int64], row_sums_R: NDArray[np.int64], column_sums_C: NDArray[np.int64]) -> None:
    """Writes the sum of each row, and adds the rows to the sums of the columns, both modulo 2^64. Numpy's loops take
    half of torch's time.
    """
    for start in range(0, len(table_RC), _ROWS_AT_ONCE):
        rows_RC = table_RC[start : start + _ROWS_AT_ONCE]
        np.add.reduce(rows_RC, axis=1, out=row_sums_R[start : start + _ROWS_AT_ONCE])
        column_sums_C += np.add.reduce(rows_RC, axis=0)
