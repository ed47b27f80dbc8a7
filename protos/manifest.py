"""Encodes the weight manifest as JSON and packs a model's tensors into buckets. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any

from tandem.protos.errors import DataError, SchemaVersionError
from tandem.protos.types import AdapterSpec, BucketSpec, DigestAlgorithm, TensorSpec, WeightManifest

MANIFEST_VERSION = 5
DIGEST_FORMATS: Mapping[DigestAlgorithm, str] = {"sums": "2:", "xxh3": "3:"}
"""Begin the digest of a version. Digests of other formats cannot be compared with it."""
LORA_A, LORA_B = ".lora_A", ".lora_B"
"""Name suffixes of the two factors of an adapted matrix."""
ALIGNMENT = 16
"""Tensors start and buckets end at multiples of this many bytes, so a bucket can be viewed as any dtype in place."""
ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}

ParameterSpec = tuple[str, str, Sequence[int]]
"""Name, dtype (torch's name without the `torch.`), shape."""


def plan_buckets(specs: Iterable[ParameterSpec], bucket_bytes: int) -> tuple[BucketSpec, ...]:
    """Packs tensors in order into flat uint8 buckets of at most `bucket_bytes`. A larger tensor gets its own bucket.
    Raises DataError for a dtype that cannot be sent.
    """
    buckets: list[BucketSpec] = []
    tensors: list[TensorSpec] = []
    filled = 0
    for name, dtype, shape in specs:
        if dtype not in ITEM_BYTES:
            raise DataError(f"parameter {name} has dtype {dtype}, which weight buckets do not carry")
        num_bytes = ITEM_BYTES[dtype] * prod(shape)
        if tensors and filled + num_bytes > bucket_bytes:
            buckets.append(BucketSpec(filled, tuple(tensors)))
            tensors, filled = [], 0
        tensors.append(TensorSpec(name, dtype, tuple(shape), filled, num_bytes))
        filled += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    if tensors:
        buckets.append(BucketSpec(filled, tuple(tensors)))
    return tuple(buckets)


def with_base(manifest: WeightManifest) -> WeightManifest:
    """Prepends the base buckets to an adapter-only version, for a sampler that lacks the base."""
    assert manifest.adapters is not None, "whole weights need no base"
    adapters = replace(manifest.adapters, brings_base=True)
    return replace(manifest, buckets=adapters.base + manifest.buckets, adapters=adapters)


def bucket_file(number: int) -> str:
    """A bucket's safetensors file in the folder of a `disk` transfer."""
    return f"bucket-{number:05d}.safetensors"


def encode_manifest(manifest: WeightManifest) -> bytes:
    """Encodes the manifest as JSON bytes."""
    values = {"schema_version": MANIFEST_VERSION, **_fields_of(manifest)}
    return json.dumps(values, separators=(",", ":"), default=_fields_of).encode()


def _fields_of(value: WeightManifest | AdapterSpec | BucketSpec | TensorSpec) -> dict[str, object]:
    """The fields by name. `dataclasses.asdict` would also copy all values, of a hundred tensors or more."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def decode_manifest(data: bytes) -> WeightManifest:
    """Decodes the output of `encode_manifest`. Raises SchemaVersionError if another schema was encoded, as its digests
    may differ, and DataError if the bytes are not a manifest, or a tensor does not lie inside its bucket.
    """
    try:
        values = json.loads(data)
        version = int(values.pop("schema_version"))
        if version != MANIFEST_VERSION:
            raise SchemaVersionError(
                f"weight manifest has schema version {version}, this software reads {MANIFEST_VERSION}: "
                "trainer and samplers must be of one release"
            )
        buckets = _buckets(values.pop("buckets"))
        if adapters := values.pop("adapters", None):
            adapters = AdapterSpec(**{**adapters, "base": _buckets(adapters["base"])})
        base = values.pop("base", None)
        manifest = WeightManifest(**values, buckets=buckets, adapters=adapters, base=tuple(base) if base else None)
        _check_types(manifest)
        for bucket in manifest.buckets + (manifest.adapters.base if manifest.adapters else ()):
            for tensor in bucket.tensors:
                _check_tensor(tensor, bucket)
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"weight manifest of {len(data)} bytes cannot be read: {error!r:.200}") from error
    return manifest


def _check_types(manifest: WeightManifest) -> None:
    base = manifest.base or (0, 0)
    for number in (manifest.incarnation, manifest.policy_version, *base):
        if type(number) is not int or not 0 <= number < 1 << 63:
            raise ValueError("incarnation and policy_version are numbers of 63 bits")
    if len(base) != 2 or manifest.encoding not in ("full", "delta"):
        raise ValueError("base has two numbers, and encoding is full or delta")
    if manifest.digest_algorithm not in DIGEST_FORMATS:
        raise ValueError("digest_algorithm is xxh3 or sums")
    if not isinstance(manifest.location, str) or not isinstance(manifest.backend, str):
        raise TypeError("backend and location are texts")


def _buckets(values: Sequence[Mapping[str, Any]]) -> tuple[BucketSpec, ...]:
    return tuple(
        BucketSpec(
            num_bytes=int(bucket["num_bytes"]),
            tensors=tuple(TensorSpec(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in bucket["tensors"]),
            digest=str(bucket["digest"]),
        )
        for bucket in values
    )


def _check_tensor(tensor: TensorSpec, bucket: BucketSpec) -> None:
    fits = 0 <= tensor.offset <= bucket.num_bytes - tensor.num_bytes and tensor.offset % ALIGNMENT == 0
    if not fits or ITEM_BYTES.get(tensor.dtype, -1) * prod(tensor.shape) != tensor.num_bytes:
        raise DataError(
            f"weight manifest: tensor {tensor.name} ({tensor.dtype}, {tensor.shape}) does not fit its bucket"
        )


def weights_digest(manifest: WeightManifest) -> str:
    """One digest of all weights of a version, in hex after its format. The buckets of a version with adapters must not
    include its base.
    """
    joined = hashlib.blake2b(digest_size=16)
    for bucket in (manifest.adapters.base if manifest.adapters else ()) + manifest.buckets:
        joined.update(bytes.fromhex(bucket.digest))
    return DIGEST_FORMATS[manifest.digest_algorithm] + joined.hexdigest()


def algorithm_of_backend(backend: str) -> DigestAlgorithm:
    """The algorithm of the digests of what a weight backend sends: from a GPU's memory, or from that of the host."""
    return "sums" if backend in ("nccl", "ipc") else "xxh3"


def algorithm_of_digest(digest: str) -> DigestAlgorithm | None:
    """The algorithm behind the digest of a version; None if this release does not have it."""
    return next((name for name, begin in DIGEST_FORMATS.items() if digest.startswith(begin)), None)
