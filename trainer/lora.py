"""Low-rank adapters (LoRA, arXiv 2106.09685) inside the policy: W + (alpha/rank)·B·A, only A and B trained, by PEFT.

PEFT puts its layers into the Hugging Face model itself, so that model goes on being what the engine runs, and with the
adapters off it is the reference policy. What leaves the trainer bears the base model's names: nobody outside need know
of PEFT's. Importing this module loads PEFT (2 s): do so only where a run has adapters.
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

from tandem.protos.errors import ConfigError
from tandem.protos.manifest import LORA_A, LORA_B
from tandem.protos.weight_group import merge_adapter
from tandem.trainer.durable import whole_folder
from tandem.trainer.engine import whole_parameters
from tandem.trainer.engine_options import LoraOptions
from tandem.trainer.export import ParameterSpec, parameter_spec

_ADAPTER = "default"
_PEFT_PREFIX = "base_model.model."
"""What PEFT's own files put before a Hugging Face name."""


class Adapters:
    """The adapters of one model. `specs` and `gather` show its weights merged, `gather_base` without them,
    `adapter_specs` and
    `gather_adapters` the adapters alone, `factor_specs` and `gather_factors` these under the base model's names, as
    samplers merge them.
    """

    def __init__(
        self, model: transformers.PreTrainedModel, options: LoraOptions, *, seed: int, zero_stage: int
    ) -> None:
        """Puts fresh adapters (B = 0, A by `seed`, the same on every rank) into the model and freezes everything else.

        Comes before the engine is built, so that DeepSpeed's optimizer holds the adapters only.

        Raises:
            ConfigError: the model has no layer of such a name, or one of them is not linear or tied to another.
        """
        self._zero_stage = zero_stage
        self.adapter_rank = options.rank
        self.scaling = options.alpha / options.rank
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
        """(Hugging Face name, dtype, shape) of every parameter of the base model, tied ones once; the same on all
        ranks.
        """
        return [parameter_spec(name, parameter) for name, parameter in self._base.items()]

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """These parameters whole and merged, W + (alpha/rank)·B·A, to be read inside the block. All ranks enter with
        the same names.

        Merged tensors are new ones, so a call costs the memory of what it names. The model is left as it is.
        """
        layers = {name: self._layers[name] for name in names if name in self._layers}
        chosen = [self._base[name] for name in names]
        chosen += [matrix for layer in layers.values() for matrix in _matrices(layer)]
        with whole_parameters(chosen, self._zero_stage), torch.no_grad():
            tensors = {name: self._base[name].detach() for name in names}
            for name, layer in layers.items():
                tensors[name] = merge_adapter(tensors[name], *_factors(layer), self.scaling)
            yield tensors

    @contextmanager
    def gather_base(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """These parameters whole, without the adapters, to be read inside the block. All ranks enter with the same
        names.
        """
        with whole_parameters([self._base[name] for name in names], self._zero_stage):
            yield {name: self._base[name].detach() for name in names}

    def factor_specs(self) -> list[ParameterSpec]:
        """(W.lora_A or W.lora_B, dtype, shape) of the two factors of every adapted W; the same on all ranks."""
        specs: list[ParameterSpec] = []
        for name, layer in self._layers.items():
            (_, dtype, (rank, size_in)), (_, _, (size_out, _)) = (parameter_spec(name, m) for m in _matrices(layer))
            if layer.fan_in_fan_out:
                size_in, size_out = size_out, size_in
            specs += [(name + LORA_A, dtype, (rank, size_in)), (name + LORA_B, dtype, (size_out, rank))]
        return specs

    @contextmanager
    def gather_factors(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """These factors, whole, to be read inside the block. All ranks enter with the same names."""
        layers = {name.removesuffix(LORA_A).removesuffix(LORA_B): None for name in names}
        with whole_parameters([m for name in layers for m in _matrices(self._layers[name])], self._zero_stage):
            factors: dict[str, Tensor] = {}
            for name in layers:
                lora_a, lora_b = _factors(self._layers[name])
                factors |= {name + LORA_A: lora_a, name + LORA_B: lora_b}
            yield {name: factors[name] for name in names}

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
        """Writes what `PeftModel.from_pretrained` loads onto `source`. The folder appears whole, in place of an earlier
        one.

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


def _factors(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    """(A, B) for the weight as it lies in memory: some layers (GPT-2's) keep theirs transposed, and (B·A)ᵀ = Aᵀ·Bᵀ."""
    lora_a, lora_b = (matrix.detach() for matrix in _matrices(layer))
    return (lora_b.T, lora_a.T) if layer.fan_in_fan_out else (lora_a, lora_b)


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
                    f"trainer.lora.target_modules: {name} shares its weight with "
                    f"{' and '.join(set(names) - {name})}; leave it out"
                )
