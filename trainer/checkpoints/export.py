"""Exports: a Hugging Face folder in safetensors that `AutoModelForCausalLM.from_pretrained` and vLLM load."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import transformers

from tandem.protos.hidden_modules import hidden_module
from tandem.protos.manifest import ParameterSpec, plan_buckets
from tandem.trainer.checkpoints.durable import atomic_folder

COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model"),
    *("chat_template*", "generation_config.json"),
)
"""Files that an export copies from the source folder."""

_PORTION_BYTES = 1 << 26

Gather = Callable[[Sequence[str]], AbstractContextManager[Mapping[str, torch.Tensor]]]


def collect_weights(
    specs: Sequence[ParameterSpec], gather: Gather, *, keep: bool, copy: bool = True
) -> dict[str, torch.Tensor]:
    """All parameters in host memory, gathered in portions; without `copy` as they are gathered, where that is host
    memory. All ranks must call it; ranks without `keep` get none.
    """
    weights: dict[str, torch.Tensor] = {}
    for portion in plan_buckets(specs, _PORTION_BYTES):
        with gather([tensor.name for tensor in portion.tensors]) as tensors:
            if keep:
                weights.update((name, tensor.to("cpu", copy=copy)) for name, tensor in tensors.items())
    return weights


def save_model(
    model: transformers.PreTrainedModel, folder: Path, state_dict: dict[str, torch.Tensor] | None = None
) -> None:
    """`save_pretrained`, which would import DeepSpeed (2 s and a warning) to ask whether the model is its engine."""
    with hidden_module("deepspeed"):
        model.save_pretrained(folder, state_dict=state_dict)


def write_export(
    model: transformers.PreTrainedModel, weights: Mapping[str, torch.Tensor], source: Path, folder: Path
) -> None:
    """Writes weights, configuration, tokenizer and generation settings atomically, replacing an existing folder. Raises
    EnvironmentLackError if the disk is full.
    """
    # transformers copies tensors that share one storage, such as the flat buffer of ZeRO stages 1 and 2.
    alone = {name: torch.from_dlpack(tensor.detach()) for name, tensor in weights.items()}
    with atomic_folder(folder) as begun:
        save_model(model, begun, state_dict=alone)
        for pattern in COPIED:
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, begun / file.name)
