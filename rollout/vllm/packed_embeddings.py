"""Embeddings on CPUs that are packed for matrix products only once one takes place.

vLLM packs the weight of every embedding, as those of some models are their output head, too. In all others it packs the
head besides, so the packed embedding, as large as the vocabulary times the hidden size, would only take memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

Pack = Callable[["UnquantizedEmbeddingMethod", nn.Module], None]


def pack_embeddings_when_used() -> None:
    """Changes vLLM in this process and its forks. May be called twice."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    pack = UnquantizedEmbeddingMethod.process_weights_after_loading
    if hasattr(pack, "__wrapped__"):
        return

    @functools.wraps(pack)
    def process(self: UnquantizedEmbeddingMethod, layer: nn.Module) -> None:
        is_packed = hasattr(layer, "cpu_linear") and not _waits(layer)
        if is_packed or isinstance(layer, ParallelLMHead) or layer.weight.device.type != "cpu":
            pack(self, layer)
        elif not _waits(layer):
            vars(layer)["cpu_linear"] = partial(_packed_product, pack, self, layer)

    UnquantizedEmbeddingMethod.process_weights_after_loading = process  # type: ignore[method-assign]


def _waits(layer: nn.Module) -> bool:
    product = getattr(layer, "cpu_linear", None)
    return isinstance(product, partial) and product.func is _packed_product


def _packed_product(
    pack: Pack, method: UnquantizedEmbeddingMethod, layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The first product packs; `layer` is the running one, also where a copy of it was loaded."""
    pack(method, layer)
    product: Tensor = vars(layer)["cpu_linear"](x, weight, bias)
    return product
