"""Low-rank adapters (LoRA, arXiv 2106.09685) inside the policy: W + (alpha/rank)·B·A, only A and B trained, by PEFT.

PEFT puts its layers into the Hugging Face model itself, so that model goes on being what the engine runs, and with the adapters
off it is the reference policy. What leaves the trainer bears the base model's names: nobody outside need know of adapters.
Importing this module loads PEFT (2 s): do so only where a run has adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
import transformers
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn

from protos.errors import ConfigError
from trainer.durable import whole_folder
from trainer.engine import whole_parameters
from trainer.engine_options import LoraOptions
from trainer.export import ParameterSpec, parameter_spec

_ADAPTER = "default"
_PEFT_PREFIX = "base_model.model."
"""What PEFT's own files put before a Hugging Face name."""


class Adapters:
    """The adapters of one model. `specs` and `gather` show its weights merged, `adapter_specs` and `gather_adapters` the adapters alone."""

    def __init__(
        self, model: transformers.PreTrainedModel, options: LoraOptions, *, seed: int, zero_stage: int
    ) -> None:
        """Puts fresh adapters (B = 0, A by `seed`, the same on every rank) into the model and freezes everything else.

        Comes before the engine is built, so that DeepSpeed's optimizer holds the adapters only.

        Raises:
            ConfigError: the model has no layer of such a name, or one of them is not linear or tied to another.
        """
        self._zero_stage = zero_stage
        targets = options.target_modules
        self._config = peft.LoraConfig(
            task_type=peft.TaskType.CAUSAL_LM,
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=0.0,
            target_modules=targets if isinstance(targets, str) else list(targets),
        )
        _refuse_tied(model, targets)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                # In bfloat16 DeepSpeed keeps the float32 master of the adapters, as it does of all that is trained.
                self._peft = peft.get_peft_model(model, self._config, _ADAPTER, autocast_adapter_dtype=False)
            except ValueError as error:
                raise ConfigError(f"trainer.lora.target_modules: {error}") from error
        self._layers: dict[str, LoraLayer] = {}
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                if not isinstance(module, Linear):
                    raise ConfigError(f"trainer.lora.target_modules: {name} is no linear layer; leave it out")
                self._layers[f"{name}.weight"] = module
        _refuse_unknown(targets, self._layers)
        parameters = dict(model.named_parameters())
        self._base = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in parameters.items()
            if not parameter.requires_grad
        }
        self._adapters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}

    def specs(self) -> list[ParameterSpec]:
        """(Hugging Face name, dtype, shape) of every parameter of the base model, tied ones once; the same on all ranks."""
        return [parameter_spec(name, parameter) for name, parameter in self._base.items()]

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """These parameters whole and merged, W + (alpha/rank)·B·A, to be read inside the block. All ranks enter with the same names.

        Merged tensors are new ones, so a call costs the memory of what it names. The model is left as it is.
        """
        layers = {name: self._layers[name] for name in names if name in self._layers}
        chosen = [self._base[name] for name in names]
        chosen += [matrix for layer in layers.values() for matrix in _matrices(layer)]
        with whole_parameters(chosen, self._zero_stage), torch.no_grad():
            tensors = {name: self._base[name].detach() for name in names}
            for name, layer in layers.items():
                base = tensors[name]
                tensors[name] = (base.float() + layer.get_delta_weight(_ADAPTER).float()).to(base.dtype)
            yield tensors

    def adapter_specs(self) -> list[ParameterSpec]:
        """(name in the model, dtype, shape) of every matrix A and B."""
        return [parameter_spec(name, parameter) for name, parameter in self._adapters.items()]

    @contextmanager
    def gather_adapters(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """These matrices, whole, to be read inside the block. All ranks enter with the same names."""
        with whole_parameters([self._adapters[name] for name in names], self._zero_stage):
            yield {name: self._adapters[name].detach() for name in names}

    def disabled(self) -> AbstractContextManager[Any]:
        """Inside the block the model is the base model. Not to be entered between a forward pass and its backward."""
        return self._peft.disable_adapter()

    def write_adapters(self, weights: Mapping[str, Tensor], source: str, folder: Path) -> None:
        """Writes what `PeftModel.from_pretrained` loads onto `source`. The folder appears whole, in place of an earlier one.

        `weights`: all of `adapter_specs`, as `collect_weights` gives them.

        Raises:
            EnvironmentLackError: the disk is full.
        """
        assert weights.keys() == self._adapters.keys(), "an adapter export holds every matrix"
        self._config.base_model_name_or_path = source
        tensors = {
            _PEFT_PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor.contiguous() for name, tensor in weights.items()
        }
        with whole_folder(folder) as begun:
            safetensors.torch.save_file(tensors, begun / "adapter_model.safetensors", metadata={"format": "pt"})
            self._config.save_pretrained(begun)


def _matrices(layer: LoraLayer) -> list[nn.Parameter]:
    return [layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight]


def _refuse_unknown(targets: str | tuple[str, ...], layers: Mapping[str, LoraLayer]) -> None:
    """PEFT says nothing of a name without a layer as long as another has one."""
    for target in () if isinstance(targets, str) else targets:
        if not any(f".{name}".endswith(f".{target}.weight") for name in layers):
            raise ConfigError(f"trainer.lora.target_modules: the model has no layer {target}; leave it out")


def _refuse_tied(model: nn.Module, targets: str | tuple[str, ...]) -> None:
    """A tied weight has two users, and an adapter would change one of them only: there is no merged weight."""
    if isinstance(targets, str):
        return  # the output head, the only linear layer that is ever tied, is left out
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            users.setdefault(id(weight), []).append(name)
    for names in (names for names in users.values() if len(names) > 1):
        for name in names:
            if name in targets or any(name.endswith(f".{target}") for target in targets):
                raise ConfigError(
                    f"trainer.lora.target_modules: {name} shares its weight with {' and '.join(set(names) - {name})}; leave it out"
                )
