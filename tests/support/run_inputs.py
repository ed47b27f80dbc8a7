"""A small generated recipe with everything it names: data, and a model folder whose weights are never loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tandem.services.config import Recipe, parse_recipe
from tests.support.dataset_files import chat_folder, verl_row, write_lines

Values = dict[str, dict[str, Any]]

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {chr(number): number - 33 for number in [*range(33, 127), 0x120]}, "merges": []},
}
"""One token per printable ASCII character; 0x120 stands for a space."""


def write_safetensors(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A safetensors file of float32 zeros."""
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, file)


def write_model(folder: Path) -> Path:
    """A Hugging Face folder of 240 parameters with a tokenizer file and a chat template."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    write_safetensors(folder / "model.safetensors", {"embed": (10, 16), "norm": (80,)})
    return folder


def write_chat_model(folder: Path) -> Path:
    """A model folder that passes the checks and tokenizes prompts; its weights are not loaded."""
    chat_folder(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model.safetensors", {"embed": (10, 16)})
    return folder


def write_dataset(file: Path) -> Path:
    """Four JSON lines in verl's columns."""
    return write_lines(file, [verl_row(f"{number} + 1 =", str(number + 1)) for number in range(4)])


def small_values(folder: Path) -> Values:
    """The values of a recipe with model and data below `folder`, and its run in `folder`/run."""
    return {
        "run": {"run_id": "small", "folder": str(folder / "run"), "total_batches": 3, "groups_per_batch": 2},
        "model": {"path": str(write_model(folder / "model"))},
        "data": {"train_file": str(write_dataset(folder / "train.jsonl")), "max_prompt_tokens": 32},
        "rollout": {"max_response_tokens": 32, "kv_cache_bytes": 1 << 20, "samples_per_prompt": 2},
    }


def recipe_of(values: Mapping[str, Mapping[str, Any]], **changes: Mapping[str, Any]) -> Recipe:
    """The recipe of these values, with the keys of some sections changed."""
    merged = {section: dict(given) for section, given in values.items()}
    for section, given in changes.items():
        merged[section] = {**merged.get(section, {}), **given}
    return parse_recipe(merged)
