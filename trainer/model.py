"""The policy's model: finding its folder and loading it."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import torch
import transformers

from protos.errors import ModelError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_folder(path: str) -> Path:
    """The local folder of a model: the path itself, or where a hub's model was downloaded to. Raises ModelError."""
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
    """The causal language model of a folder on the CPU, in training mode, every dropout 0: what is trained is what was sampled.

    Raises:
        ModelError: transformers cannot load it.
    """
    transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        dropouts = {
            name: value for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)
        }
        for name in dropouts:
            setattr(config, name, 0.0)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=_DTYPES[dtype])
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"model folder {folder} cannot be loaded: {_first_line(error)}") from error
    for name, value in dropouts.items():
        setattr(model.config, name, value)  # an export says what the model came with
    return model.train()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
