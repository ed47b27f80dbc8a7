"""Checks a model folder, and whether critic, adapters and prompts fit it, without loading the model or torch."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from tandem.protos.error_text import did_you_mean, nearest
from tandem.protos.errors import ConfigError, DataError, ModelError
from tandem.rollout.engine import find_engine
from tandem.services.config import Recipe

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_TIMEOUT_SECONDS = 3.0
CHECKED_ROWS = 100_000
"""Prompts of larger datasets are not checked."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from a model's files. `num_parameters` counts tied weights once."""

    architecture: str
    num_parameters: int
    layers: frozenset[str] = frozenset()
    """Modules with a weight matrix in the files; a tied output head has none. Empty if unknown."""
    vocabulary: int = 0
    """Size of the vocabulary; 0 if config.json does not name it."""
    num_layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    """Of a feed-forward layer. All three are 0 if config.json does not name them."""
    num_critic_parameters: int = 0
    """Parameters of the critic."""


def check_model(recipe: Recipe) -> ModelFacts | None:
    """Checks `[model]`; raises a one-line ModelError. None for a hub model that is not downloaded yet."""
    if recipe.model.chat_template:
        from tandem.services.data.chat import read_template

        read_template(recipe.model.chat_template)
    folder = _model_folder(recipe.model.path, "model.path")
    if folder is None:
        return None
    what = f"model.path {folder}"
    config = _read_json(folder / "config.json", what)
    architecture = _architecture(folder, config, recipe.rollout.engine)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        names = ", ".join(_TOKENIZER_FILES)
        raise ModelError(f"{what}: no tokenizer (none of {names}); save it there beside the model")
    if not recipe.model.chat_template and not _has_template(folder):
        remedy = "set model.chat_template to a file with a Jinja template"
        raise ModelError(f"{what}: its tokenizer has no chat template; {remedy}")
    _check_length(recipe, config, what)
    num_parameters, layers = _weights(folder, config, what)
    num_layers, hidden = _size(config, "num_hidden_layers"), _size(config, "hidden_size")
    intermediate = _size(config, "intermediate_size")
    return ModelFacts(architecture, num_parameters, layers, _vocabulary(config), num_layers, hidden, intermediate)


def hidden_size(path: str) -> int:
    """The hidden size of the model in a folder; 0 if it is not known, also if `check_model` would refuse the folder."""
    try:
        return _size(_read_json(Path(path) / "config.json", path), "hidden_size")
    except ModelError:
        return 0


def check_critic(recipe: Recipe, policy: ModelFacts | None) -> int:
    """Checks `trainer.critic`; raises ModelError. Returns its number of parameters, 0 if there is none or unknown."""
    path = recipe.trainer.critic.path
    if not recipe.trainer.needs_critic:
        return 0
    if not path:
        return policy.num_parameters if policy is not None else 0
    folder = _model_folder(path, "trainer.critic.path")
    if folder is None:
        return 0
    what = f"trainer.critic.path {folder}"
    config = _read_json(folder / "config.json", what)
    _check_length(recipe, config, what)
    vocabulary = _vocabulary(config)
    if policy is not None and 0 < vocabulary < policy.vocabulary:
        fault = f"{what}: it knows {vocabulary} tokens and the policy {policy.vocabulary}"
        raise ModelError(f"{fault}; name a model with the policy's tokenizer")
    return _weights(folder, config, what)[0]


def check_adapters(recipe: Recipe, policy: ModelFacts | None) -> None:
    """Raises ConfigError if the model, whose layers are known, lacks one of `trainer.lora.target_modules`."""
    lora = recipe.trainer.lora
    if lora is None or isinstance(lora.target_modules, str) or policy is None or not policy.layers:
        return
    known = {layer.rpartition(".")[2] for layer in policy.layers}
    for target in lora.target_modules:
        name = target.rpartition(".")[2]
        if name not in known:
            lack = f"{recipe.model.path} has no linear layer {target} with a weight of its own"
            raise ConfigError(f"trainer.lora.target_modules: {lack}{did_you_mean(name, known)} (or all-linear)")


def check_prompts(recipe: Recipe) -> None:
    """Checks that a row of the training files has a prompt of at most `data.max_prompt_tokens`.

    Counts the tokens of the messages without the chat template, which can only add tokens. Skips models without
    tokenizer.json and datasets with more than `CHECKED_ROWS` rows, whose faults the feed reports. Ends at the first
    prompt that fits. Raises DataError, or ModelError if tokenizer.json cannot be read.
    """
    from tandem.services.data.dataset import Mixture, Row

    limit = recipe.data.max_prompt_tokens
    file = Path(recipe.model.path) / "tokenizer.json"
    dataset = Mixture(recipe.data.train_files)
    if not file.is_file() or len(dataset) > CHECKED_ROWS:
        return
    from tokenizers import Tokenizer  # not part of the client-only installation

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ModelError(f"model.path {recipe.model.path}: tokenizer.json cannot be read: {error}") from error
    shortest: int | None = None
    for row in (dataset.row(index, 0) for index in range(len(dataset))):
        if isinstance(row, Row):
            contents = (str(message["content"]) for message in row.messages)
            length = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in contents)
            if length <= limit:
                return
            shortest = min(length, shortest or length)
    why = f"the shortest has {shortest} tokens and data.max_prompt_tokens is {limit}" if shortest else "no prompt"
    raise DataError(f"dataset {dataset.name} has no usable row ({why}); see `tandem data check {dataset.name}`")


def is_hub_name(path: str) -> bool:
    """Whether the path names a model on a hub rather than a folder."""
    return not Path(path).exists() and _HUB_NAME.fullmatch(path) is not None


def _check_length(recipe: Recipe, config: Mapping[str, object], what: str) -> None:
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and recipe.max_model_tokens > longest:
        raise ModelError(
            f"{what}: it reads at most {longest} tokens, data.max_prompt_tokens + rollout.max_response_tokens is "
            f"{recipe.max_model_tokens}; lower one of them"
        )


def _vocabulary(config: Mapping[str, object]) -> int:
    return _size(config, "vocab_size")


def _size(config: Mapping[str, object], name: str) -> int:
    """0 if the model does not name it."""
    size = config.get(name)
    return size if isinstance(size, int) else 0


def _model_folder(path: str, key: str) -> Path | None:
    """The model's folder; None for a hub model that is not downloaded yet."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{key} {path} is a file; name the Hugging Face folder that holds config.json")
    if not _HUB_NAME.fullmatch(path):
        raise ModelError(
            f"{key} {path}: no such folder; name a Hugging Face folder, or a hub name like Qwen/Qwen2.5-0.5B-Instruct"
        )
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = sorted(cache.glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json"))
    if snapshots:
        return snapshots[-1].parent
    _ask_hub(path, key)
    return None


def _ask_hub(name: str, key: str) -> None:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    why = "HF_HUB_OFFLINE is set"
    if os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0"):
        try:
            request = urllib.request.Request(f"{endpoint}/{name}/resolve/main/config.json", method="HEAD")
            with urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_SECONDS):
                return
        except urllib.error.HTTPError as error:
            why = f"{endpoint} answers {error.code} for it"
        except (OSError, ValueError) as error:
            why = f"{endpoint} cannot be reached: {getattr(error, 'reason', error)}"
    raise ModelError(f"{key} {name}: no such folder here, and no hub gives it ({why}); download it and name its folder")


def _read_json(file: Path, what: str) -> dict[str, object]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{what}: no {file.name} in it; name the Hugging Face folder that holds one") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{what}: {file.name} cannot be read ({error}); save the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{what}: {file.name} is not a JSON object; save the model again")
    return value


def _architecture(folder: Path, config: Mapping[str, object], engine: str) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        raise ModelError(
            f'model.path {folder}: config.json names no architecture; add e.g. "architectures": ["Qwen2ForCausalLM"]'
        )
    known = find_engine(engine).known_architectures()
    if known and named[0] not in known:
        near = nearest(named[0], known, 0.6)
        fault = f"model.path {folder}: the installed {engine} knows no text model {named[0]}"
        fault += f" (the nearest is {near})" if near else ""
        raise ModelError(f"{fault}; choose a causal language model it supports, or another rollout.engine")
    return named[0]


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(_read_json(settings, f"model.path {folder}").get("chat_template"))


def _weights(folder: Path, config: Mapping[str, object], what: str) -> tuple[int, frozenset[str]]:
    """The number of parameters in the folder's weight files, and the modules that have a weight matrix."""
    shapes: dict[str, list[int]] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        shapes |= _shapes(shard, what)
    if shapes:
        layers = (name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight"))
        return sum(map(prod, shapes.values())), frozenset(name.removesuffix(".weight") for name in layers)
    pickles = [*folder.glob("pytorch_model*.bin")]
    if not pickles:
        raise ModelError(f"{what}: no weights (*.safetensors) in it; save the model again, or name another folder")
    width = 4 if config.get("torch_dtype", config.get("dtype")) in (None, "float32") else 2
    return sum(file.stat().st_size for file in pickles) // width, frozenset()


def _shapes(file: Path, what: str) -> dict[str, list[int]]:
    """Tensor shapes by name, from the header of a safetensors file."""
    from safetensors import SafetensorError, safe_open  # not part of the client-only installation

    try:
        with safe_open(file, framework="np") as header:
            return {name: header.get_slice(name).get_shape() for name in header.keys()}  # noqa: SIM118 (it is no dict)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{what}: {file.name} is damaged or cut short ({error}); copy or save it again") from None
