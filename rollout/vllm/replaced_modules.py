"""Loads a version of the weights beside a running model on a CPU, and puts it in place within a few milliseconds.

vLLM packs the weights of a linear layer for its CPU kernels, so they cannot be copied into the running model: packing
takes too long to stop the engine for it. A second set of modules, which shares everything but the parameters with the
running one, is loaded and packed as vLLM's loader does it, while the engine goes on. Between two steps its parameters
and kernels then replace the running ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import MethodType

import torch
from torch import nn

Replacement = tuple[nn.Module, dict[str, object]]
"""A running module and its new attributes."""


@cache
def can_be_replaced(model: nn.Module) -> bool:
    """Whether new weights change nothing but the parameters and kernels of linear layers, embeddings and norms.

    No, for example, for quantised weights, experts, and attention that keeps a form of its projections.
    """
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and type(method) not in plain:
            return False
        if is_deferred_attention_layer(module) and type(module) is not Attention:
            return False
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def load_beside(model: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]], *, tied: bool) -> list[Replacement]:
    """Loads a full set of Hugging Face tensors for a model that `can_be_replaced`.

    `tied`: the head shares the embedding's parameter.
    """
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    with torch.no_grad():
        pairs = _Copies(tied).of(model)
        loaded = pairs[-1][1]
        loaded.load_weights(tensors)  # type: ignore[operator]
        for running, module in pairs:
            method = getattr(module, "quant_method", None)
            if module is not running and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)
    return [(running, _changes(running, module)) for running, module in pairs if module is not running]


def replace(replacements: list[Replacement]) -> None:
    """Puts loaded weights in place, between two steps."""
    for running, changes in replacements:
        running.__dict__.update(changes)


class _Copies:
    """Copies modules with parameters of their own and everything else shared."""

    def __init__(self, tied: bool) -> None:
        self._tied = tied
        self._modules: dict[int, nn.Module] = {}
        self._parameters: dict[int, torch.Tensor] = {}
        self._pairs: list[tuple[nn.Module, nn.Module]] = []

    def of(self, model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
        """Each module and its copy; the model comes last."""
        self._copy(model)
        return self._pairs

    def _copy(self, module: nn.Module) -> nn.Module:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        if id(module) in self._modules:
            return self._modules[id(module)]
        copy = module
        if not is_deferred_attention_layer(module):
            copy = object.__new__(type(module))
            copy.__dict__.update(module.__dict__)
            unpacked, _ = get_layerwise_info(module).restore_metadata  # as they were before vLLM packed them
            copy.__dict__["_parameters"] = {
                name: parameter if parameter is None else self._empty(parameter, unpacked.get(name), module)
                for name, parameter in module._parameters.items()
            }
            copy._buffers = {
                name: buffer if name in module._non_persistent_buffers_set or buffer is None else buffer.clone()
                for name, buffer in module._buffers.items()
            }
            copy._modules = {name: child and self._copy(child) for name, child in module._modules.items()}
        self._modules[id(module)] = copy
        self._pairs.append((module, copy))
        return copy

    def _empty(self, parameter: nn.Parameter, unpacked: torch.Tensor | None, owner: nn.Module) -> torch.Tensor:
        if self._tied and id(parameter) in self._parameters:
            return self._parameters[id(parameter)]
        like = parameter if unpacked is None else unpacked
        empty = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
        empty.__class__ = like.__class__
        for name, value in like.__dict__.items():
            # vLLM's record of a parameter lacks the module of which its loader is a method. With the copy for it, each
            # version would be a cycle, and stay in memory: the engine seldom collects garbage.
            empty.__dict__[name] = MethodType(value.__func__, owner) if isinstance(value, MethodType) else value
        self._parameters[id(parameter)] = empty
        return empty


def _changes(running: nn.Module, loaded: nn.Module) -> dict[str, object]:
    """What differs, and the packed product, which the running module may make anew before it is replaced."""
    return {
        name: value
        for name, value in loaded.__dict__.items()
        if name == "cpu_linear" or (name != "_modules" and running.__dict__.get(name) is not value)
    }
