"""Exports: a Hugging Face folder in safetensors that `AutoModelForCausalLM.from_pretrained` and vLLM load."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import transformers

from tandem.protos.manifest import ParameterSpec, plan_buckets
from tandem.trainer.checkpoints.durable import atomic_folder

COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model"),
    *("chat_template*", "generation_config.json"),
)
"""Files that an export copies from the source folder."""

_PORTION_BYTES = 1 << 26

Gather = Callable[[Sequence[str]], AbstractContextManager[Mapping[str, torch.Tensor]]]


def collect_weights(specs: Sequence[ParameterSpec], gather: Gather, *, keep: bool) -> dict[str, torch.Tensor]:
    """Copies of all parameters in host memory, gathered in portions. All ranks must call it; ranks without `keep` get
    none.
    """
    weights: dict[str, torch.Tensor] = {}
    for portion in plan_buckets(specs, _PORTION_BYTES):
        with gather([tensor.name for tensor in portion.tensors]) as tensors:
            if keep:
                weights.update((name, tensor.to("cpu", copy=True)) for name, tensor in tensors.items())
    return weights


def write_export(
    model: transformers.PreTrainedModel, weights: Mapping[str, torch.Tensor], source: Path, folder: Path
) -> None:
    """Writes weights, configuration, tokenizer and generation settings atomically, replacing an existing folder. Raises
    EnvironmentLackError if the disk is full.
    """
    with atomic_folder(folder) as begun:
        model.save_pretrained(begun, state_dict=dict(weights))
        for pattern in COPIED:
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, begun / file.name)
