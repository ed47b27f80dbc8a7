"""Low-rank adapters (LoRA, arXiv 2106.09685) inside the policy: W + (alpha/rank)·B·A, of which only A and B are
trained.

PEFT inserts its layers into the Hugging Face model, so the engine runs the same model object. Weights that leave the
trainer have the base model's names, not PEFT's. Only runs with adapters import this module, because PEFT takes 2 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import peft
import safetensors.torch
import torch
import transformers
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn

from tandem.protos.errors import ConfigError
from tandem.protos.manifest import LORA_A, LORA_B, ParameterSpec
from tandem.protos.weight_group import merge_adapter
from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.checkpoints.durable import atomic_folder
from tandem.trainer.checkpoints.export import collect_weights
from tandem.trainer.config import LoraOptions

_ADAPTER = "default"
_PEFT_PREFIX = "base_model.model."
"""Prefix of the parameter names in PEFT's files."""


def insert_adapters(model: transformers.PreTrainedModel, options: LoraOptions, *, seed: int) -> peft.PeftModel:
    """Inserts new adapters (B = 0, A by `seed`, the same on every rank) into the model and freezes everything else.

    Call it before the engine is built, so that the optimizer holds only the adapters. Raises ConfigError if the model
    has no layer of such a name, or one of them is not linear or tied to another.
    """
    targets = options.target_modules
    config = peft.LoraConfig(
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
            # In bfloat16 the backend keeps float32 master weights of the adapters, as of all trained weights.
            adapted = peft.get_peft_model(model, config, _ADAPTER, autocast_adapter_dtype=False)
        except ValueError as error:
            raise ConfigError(f"trainer.lora.target_modules: {error}") from error
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not isinstance(module, Linear):
            raise ConfigError(f"trainer.lora.target_modules: {name} is not a linear layer; leave it out")
    # PEFT ignores names that match no layer if another name matches one.
    for target in () if isinstance(targets, str) else targets:
        if not any(f".{name}".endswith(f".{target}.weight") for name in _adapted_layers(model)):
            raise ConfigError(f"trainer.lora.target_modules: the model has no layer {target}; leave it out")
    return adapted


class Adapters:
    """The adapters of one model. `specs` and `gather` are the merged weights, `gather_base` the base weights,
    `factor_specs` and `gather_factors` the adapters under the base model's names, as samplers merge them. Specs are the
    same on all ranks and name tied parameters once. All ranks must call a gather method with the same names; its full
    tensors are valid only inside the block.
    """

    def __init__(self, adapted: peft.PeftModel, options: LoraOptions, weights: TrainingEngine) -> None:
        """`adapted`: what `insert_adapters` returned; `weights`: the engine built around the same model."""
        self.adapter_rank = options.rank
        self.scaling = options.alpha / options.rank
        self._peft = adapted
        self._weights = weights
        self._layers = _adapted_layers(weights.module)
        trained = {name for name, parameter in weights.module.named_parameters() if parameter.requires_grad}
        self._adapter_specs = {spec[0]: spec for spec in weights.specs if spec[0] in trained}
        self._base_specs = {
            name.replace(".base_layer.", "."): (name, dtype, shape)
            for name, dtype, shape in weights.specs
            if name not in trained
        }

    def specs(self) -> list[ParameterSpec]:
        """(Hugging Face name, dtype, shape) of every parameter of the base model."""
        return [(name, dtype, shape) for name, (_, dtype, shape) in self._base_specs.items()]

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """These parameters, merged. Merged tensors are copies, so a call needs memory for all parameters it names."""
        adapted = [name for name in names if name in self._layers]
        wanted = [self._base_specs[name][0] for name in names]
        wanted += [matrix for name in adapted for matrix in _matrices(name)]
        with self._weights.gather(wanted) as found, torch.no_grad():
            tensors = {name: found[self._base_specs[name][0]] for name in names}
            for name in adapted:
                tensors[name] = merge_adapter(tensors[name], *self._factors(name, found), self.scaling)
            yield tensors

    @contextmanager
    def gather_base(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """These parameters without the adapters."""
        with self._weights.gather([self._base_specs[name][0] for name in names]) as found:
            yield {name: found[self._base_specs[name][0]] for name in names}

    def factor_specs(self) -> list[ParameterSpec]:
        """(W.lora_A or W.lora_B, dtype, shape) of the two factors of every adapted W."""
        specs: list[ParameterSpec] = []
        for name, layer in self._layers.items():
            (_, dtype, (rank, size_in)), (_, _, (size_out, _)) = (self._adapter_specs[m] for m in _matrices(name))
            if layer.fan_in_fan_out:
                size_in, size_out = size_out, size_in
            specs += [(name + LORA_A, dtype, (rank, size_in)), (name + LORA_B, dtype, (size_out, rank))]
        return specs

    @contextmanager
    def gather_factors(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """These factors."""
        layers = dict.fromkeys(name.removesuffix(LORA_A).removesuffix(LORA_B) for name in names)
        with self._weights.gather([matrix for name in layers for matrix in _matrices(name)]) as found:
            factors: dict[str, Tensor] = {}
            for name in layers:
                factors[name + LORA_A], factors[name + LORA_B] = self._factors(name, found)
            yield {name: factors[name] for name in names}

    def _factors(self, name: str, found: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(A, B) in the weight's memory layout. Some layers (GPT-2's) are transposed, and (B·A)ᵀ = Aᵀ·Bᵀ."""
        lora_a, lora_b = (found[matrix] for matrix in _matrices(name))
        return (lora_b.T, lora_a.T) if self._layers[name].fan_in_fan_out else (lora_a, lora_b)

    def disabled(self) -> AbstractContextManager[None]:
        """Disables the adapters inside the block. Do not use it between a forward pass and its backward pass."""
        disabled: AbstractContextManager[None] = self._peft.disable_adapter()
        return disabled

    def export(self, source: Path, folder: Path, *, writes: bool) -> None:
        """Writes a folder that `PeftModel.from_pretrained` loads onto `source`, atomically, replacing an existing one.
        All ranks must call it; one `writes`. Raises EnvironmentLackError if the disk is full.
        """
        weights = collect_weights(list(self._adapter_specs.values()), self._weights.gather, keep=writes)
        if not writes:
            return
        config = self._peft.peft_config[_ADAPTER]
        config.base_model_name_or_path = str(source)
        tensors = {
            _PEFT_PREFIX + name.replace(f".{_ADAPTER}.", "."): tensor.contiguous() for name, tensor in weights.items()
        }
        with atomic_folder(folder) as begun:
            safetensors.torch.save_file(tensors, begun / "adapter_model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(begun)


def _adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Hugging Face name of an adapted weight → its layer."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _matrices(name: str) -> list[str]:
    """Names in the model of the matrices A and B of an adapted weight."""
    layer = name.removesuffix(".weight")
    return [f"{layer}.lora_A.{_ADAPTER}.weight", f"{layer}.lora_B.{_ADAPTER}.weight"]


def _refuse_tied(model: nn.Module, targets: str | tuple[str, ...]) -> None:
    """Refuses adapters on tied weights: they would change only one of the two uses, so no merged weight exists."""
    if isinstance(targets, str):
        return  # "all-linear" excludes the output head, the only linear layer that can be tied
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            users.setdefault(id(weight), []).append(name)
    for names in (names for names in users.values() if len(names) > 1):
        for name in names:
            if name in targets or any(name.endswith(f".{target}") for target in targets):
                raise ConfigError(
                    f"trainer.lora.target_modules: {name} shares its weight with "
                    f"{' and '.join(set(names) - {name})}; leave it out"
                )
