"""Finds and loads the policy's and the critic's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from tandem.protos.errors import ModelError
from tandem.trainer.models.token_model import add_token_statistics

_UNREADABLE = (
    *(OSError, ValueError, KeyError, RuntimeError),
    *(SafetensorError, UnpicklingError, EOFError),  # weight files that are truncated or invalid
    StrictDataclassError,  # invalid values in config.json
)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_folder(path: str) -> Path:
    """The local folder of a model: the path itself, or the download of a hub's model. Raises ModelError."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ModelError(f"model folder {path} does not exist; set model.path to a Hugging Face folder")
    try:
        return Path(huggingface_hub.snapshot_download(path, ignore_patterns=["*.bin", "*.gguf", "*.pth", "original/*"]))
    except Exception as error:
        raise ModelError(f"model {path} is no folder here and could not be downloaded: {_first_line(error)}") from error


def load_model(folder: Path, dtype: str) -> transformers.PreTrainedModel:
    """Loads the causal language model of a folder on the CPU, in training mode. Every dropout is 0, so that training
    sees the same policy as sampling. The model can return statistics of loss tokens (trainer/models/token_model.py).
    Raises ModelError.
    """
    with _loading(folder):
        config = transformers.AutoConfig.from_pretrained(folder)
        dropouts = _remove_dropout(config)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=_DTYPES[dtype])
    for name, value in dropouts.items():
        setattr(model.config, name, value)  # exports keep the original values
    add_token_statistics(model)
    return model.train()


class ValueHead(nn.Linear):
    """(…, hidden) → (…, 1), always in float32, because bfloat16 has three digits."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(input.float(), self.weight.float(), bias)


def load_value_model(folder: Path, dtype: str) -> transformers.PreTrainedModel:
    """The folder's architecture with a head that gives one number per token (`logits`, (B, T, 1)), in training mode and
    with every dropout 0.

    For a language model the new head's weights are 0, so that every initial value is 0. The one-number head of a value
    or reward model is kept. Raises ModelError if transformers cannot load it, has no such class for it, or the folder
    lacks weights of the model below the head.
    """
    with _loading(folder), torch.random.fork_rng(devices=[]):
        config = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
        _remove_dropout(config)
        with _silent():  # transformers logs missing weights; the check below raises
            model, report = transformers.AutoModelForTokenClassification.from_pretrained(
                folder, config=config, dtype=_DTYPES[dtype], output_loading_info=True
            )
    heads = [(n, m) for n, m in model.named_children() if isinstance(m, nn.Linear) and m.out_features == 1]
    if len(heads) != 1:
        raise ModelError(
            f"model folder {folder}: {type(model).__name__} has no single value head; it cannot be a critic"
        )
    ((name, linear),) = heads
    lacking = sorted(key for key in report["missing_keys"] if not key.startswith(f"{name}."))
    if lacking:
        raise ModelError(
            f"model folder {folder} lacks {len(lacking)} weights of a value model, {lacking[0]} among them"
        )
    head = ValueHead(linear.in_features, 1, bias=linear.bias is not None, device="meta")
    for part, parameter in linear.named_parameters():
        setattr(head, part, parameter)
        if f"{name}.{part}" in report["missing_keys"]:
            nn.init.zeros_(parameter)
    setattr(model, name, head)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # some classes hard-code a dropout
    return model.train()


def _remove_dropout(config: Any) -> dict[str, float]:
    """Sets every dropout of the configuration to 0 and returns what they were."""
    dropouts = {name: value for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)}
    for name in dropouts:
        setattr(config, name, 0.0)
    return dropouts


@contextmanager
def _silent() -> Iterator[None]:
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    except _UNREADABLE as error:
        raise ModelError(
            f"model folder {folder} cannot be loaded: {_first_line(error)}; copy or save it again, or name another one"
        ) from error


def _first_line(error: BaseException) -> str:
    """The first line of the error's text, plus the second if the first only introduces it."""
    first, *others = (str(error).strip() or type(error).__name__).splitlines()
    return f"{first} {others[0].strip()}" if others and first.endswith(":") else first
