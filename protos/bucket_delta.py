"""The lossless difference between a bucket and the same bucket of an earlier version. Imports no torch.

It holds the elements whose bits changed: the gaps between their positions, and the exclusive or of their old and new
bits. Both are split into planes of equal bytes, in which zeros and repetitions are frequent, and compressed with zstd.
If all elements changed, there are no gaps.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tandem.protos.errors import WeightTransferError
from tandem.protos.manifest import ITEM_BYTES
from tandem.protos.types import BucketSpec

Bytes = NDArray[np.uint8]
Elements = NDArray[np.uint64]
"""Unsigned numbers of 1, 2, 4 or 8 bytes; uint64 stands for all of them in the types."""

_HEADER = struct.Struct("<QQ")
"""Number of changed elements, size of the compressed gaps; the compressed values follow."""
_LARGEST_SHARE = 0.9
"""A difference that is larger than this share of its bucket costs more time than it saves."""
_CODEC = pa.Codec("zstd", compression_level=1)


def encode_delta(spec: BucketSpec, base: Bytes, new: Bytes) -> Bytes | None:
    """The difference from `base` to `new`, uint8 (num_bytes,) each, or None if the bucket is better sent whole."""
    changes = np.bitwise_xor(_elements(spec, base), _elements(spec, new))
    positions = np.flatnonzero(changes != 0)
    gaps = b""
    if len(positions) < len(changes):
        changes = changes[positions]
        distances = np.diff(positions, prepend=-1) - 1
        if len(distances) and distances.max() > np.iinfo(np.uint32).max:
            return None
        gaps = _compress(distances.astype(np.uint32))
    encoded = _HEADER.pack(len(changes), len(gaps)) + gaps + _compress(changes)
    if len(encoded) > _LARGEST_SHARE * spec.num_bytes:
        return None
    return np.frombuffer(bytearray(encoded), np.uint8)


def apply_delta(spec: BucketSpec, delta: Bytes, held: Bytes) -> None:
    """Changes the bits of the base in `held`, uint8 (num_bytes,), to the new ones. Raises WeightTransferError if the
    difference cannot be read or does not fit the bucket; `held` may have changed then.
    """
    elements = _elements(spec, held)
    try:
        num_changed, num_gap_bytes = _HEADER.unpack_from(delta.data)
        if num_changed > len(elements):
            raise ValueError(f"{num_changed} changes for {len(elements)} elements")
        encoded = delta[_HEADER.size :]
        changes = _decompress(encoded[num_gap_bytes:], num_changed, elements.itemsize)
        if num_gap_bytes == 0:
            elements ^= changes
            return
        gaps = _decompress(encoded[:num_gap_bytes], num_changed, 4)
        elements[np.cumsum(gaps.astype(np.int64) + 1) - 1] ^= changes
    except (ValueError, IndexError, struct.error, OSError, pa.ArrowException) as error:
        raise WeightTransferError(f"the difference of a bucket cannot be read: {error!s:.200}") from error


def _elements(spec: BucketSpec, data: Bytes) -> Elements:
    """The bucket as unsigned numbers of its smallest element's size; alignment makes any size fit."""
    size = min((ITEM_BYTES[tensor.dtype] for tensor in spec.tensors), default=1)
    return data.view(f"<u{size}")


def _compress(values: Elements | NDArray[np.uint32]) -> bytes:
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(len(values), values.itemsize).T)
    return bytes(_CODEC.compress(pa.py_buffer(planes), asbytes=True))


def _decompress(data: Bytes, length: int, item_bytes: int) -> Elements:
    planes = _CODEC.decompress(pa.py_buffer(data), length * item_bytes, asbytes=True)
    values = np.frombuffer(planes, np.uint8).reshape(item_bytes, length)
    return np.ascontiguousarray(values.T).view(f"<u{item_bytes}").reshape(length)
