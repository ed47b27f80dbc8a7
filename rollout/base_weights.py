"""The base weights that adapter-only versions are merged into. They come from the model folder or from the trainer.

Every version is merged into the unchanged base, so rounding errors do not accumulate. Weights that the folder holds in
the run's dtype are memory-mapped and shared by all workers of a machine. Weights in another dtype and received weights
are copied to host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open

from tandem.protos.errors import DataError, MissingBaseWeightsError, WeightTransferError
from tandem.protos.manifest import LORA_A, LORA_B
from tandem.protos.types import BucketSpec, DigestAlgorithm, WeightManifest
from tandem.protos.weight_group import empty_bucket, fill_bucket, merge_adapter

_CPU = torch.device("cpu")


class BaseWeights:
    """Holds at most one base. `folder`: folder that the model was loaded from; None if it is not on this machine."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._specs: tuple[BucketSpec, ...] = ()
        self._tensors: dict[str, torch.Tensor] = {}
        self._files: dict[Path, tuple[int, ...]] = {}

    def merged(
        self, manifest: WeightManifest, arrived: Mapping[str, torch.Tensor], device: torch.device
    ) -> list[tuple[str, torch.Tensor]]:
        """Returns names and tensors of the full model on `device`, from the checked tensors of a version with adapters.

        Raises MissingBaseWeightsError if the base was neither sent nor held, and is not in the folder.
        """
        adapters = manifest.adapters
        assert adapters is not None
        if adapters.brings_base:
            self._tensors = {t.name: arrived[t.name].cpu() for spec in adapters.base for t in spec.tensors}
            self._specs, self._files = adapters.base, {}
        elif not self._holds(adapters.base):
            self._find(adapters.base, manifest.digest_algorithm)
        whole = []
        for name, base in self._tensors.items():
            if name + LORA_A in arrived:
                lora_a, lora_b = (arrived[name + end].to(device) for end in (LORA_A, LORA_B))
                whole.append((name, merge_adapter(base.to(device), lora_a, lora_b, adapters.scaling)))
            else:
                whole.append((name, base.to(device, copy=True)))  # a model may write to the tensors it loads
        if device.type == "cuda":  # they are used on another stream than this thread's
            torch.cuda.current_stream(device).synchronize()
        return whole

    def _holds(self, specs: tuple[BucketSpec, ...]) -> bool:
        return self._specs == specs and all(_state(file) == state for file, state in self._files.items())

    def _find(self, specs: tuple[BucketSpec, ...], algorithm: DigestAlgorithm) -> None:
        """Holds the folder's weights if they are bit-identical to the base."""
        self._specs, self._tensors, self._files = (), {}, {}
        files = {file: _state(file) for file in sorted(self._folder.glob("*.safetensors"))} if self._folder else {}
        try:
            found = _map_files(files)
            tensors: dict[str, torch.Tensor] = {}
            for spec in specs:
                part = {tensor.name: found[tensor.name].to(getattr(torch, tensor.dtype)) for tensor in spec.tensors}
                if fill_bucket(spec, part, empty_bucket(spec, _CPU), algorithm) != spec.digest:
                    told = f"{self._folder} holds other weights than the trainer's base, which must be sent"
                    raise MissingBaseWeightsError(told)
                tensors |= part
        except (OSError, SafetensorError, KeyError, DataError) as error:
            told = f"the trainer's base weights are not in {self._folder} and must be sent"
            raise MissingBaseWeightsError(told) from error
        self._specs, self._tensors, self._files = specs, tensors, files


def check_factors(manifest: WeightManifest) -> None:
    """Raises WeightTransferError unless the buckets hold pairs of factors, each for a matrix of the base."""
    adapters = manifest.adapters
    assert adapters is not None
    base = {tensor.name: tensor.shape for bucket in adapters.base for tensor in bucket.tensors}
    sent = {tensor.name: tensor.shape for bucket in manifest.buckets for tensor in bucket.tensors}
    for factor in sent.keys() - base.keys():
        name = factor.removesuffix(LORA_A).removesuffix(LORA_B)
        shapes = sent.get(name + LORA_A), sent.get(name + LORA_B)
        size_out, size_in = base[name] if len(base.get(name, ())) == 2 else (-1, -1)
        if shapes != ((adapters.rank, size_in), (size_out, adapters.rank)):
            raise WeightTransferError(f"version {manifest.policy_version}: {factor} fits no matrix of the base")


def local_folder(model: str) -> Path | None:
    """Returns the folder of a local model or of a downloaded hub model; None if it is not on this machine."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(huggingface_hub.snapshot_download(model, local_files_only=True))
    except Exception:  # not the name of a hub model, or not in the cache
        return None


def _map_files(files: Mapping[Path, object]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def _state(file: Path) -> tuple[int, ...]:
    """Returns a value that changes with the file. If it changed, the mapped weights are no longer the checked ones."""
    try:
        found = file.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    except OSError:
        return ()


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Returns the shapes of a checkpoint's tensors by name; None if the folder has no safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    # Some old checkpoints store rotary tables, which are computed, not trained.
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")} or None
