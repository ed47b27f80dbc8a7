"""Small models of several architectures, batches that are packed in several ways, and a plain version of torch's kernel
for variable-length attention.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DeepseekV3Config

from tandem.protos.types import Packing, TrainBatch, TrajectoryGroup
from tests.support.algorithm_groups import groups_of, plain_policy
from tests.support.tiny_model import VOCABULARY
from tests.support.token_model_rank import CPU
from tests.support.training_groups import make_batch

SMALL = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
LATENT = DeepseekV3Config(  # its value heads are narrower than its key heads
    **{**SMALL, "num_key_value_heads": 2},
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 8},
    first_k_dense_replace=2,
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EVERY_COLUMN = {
    "advantage": {"name": "gae", "lam": 0.95},
    "critic": {"learning_rate": 1e-2, "value_clip": 0.5},
    "kl": {"reward": {"coefficient": 0.1}, "loss": {"coefficient": 0.1}},
    "entropy_coefficient": 0.01,
    "correction": {"rejections": [{"level": "sequence", "measure": "ratio", "low": 0.5, "high": 2.0}]},
}
"""Settings of a trainer that uses every column of a batch."""


class Alone:
    """Has the attributes of an engine and of a rank, around a plain model."""

    def __init__(self, model: Any) -> None:
        self.module, self.device, self.rank = model, CPU, 0
        self.dtype = next(model.parameters()).dtype

    def __call__(self, **named: Any) -> Any:
        return self.module(**named)

    def all_agree(self, ok: bool) -> bool:
        return ok


def small(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(config)).to(dtype).train()


def kernel(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, *_: Any, **named: Any
) -> Tensor:
    """Computes sequence by sequence what torch's GPU kernel computes; the last query sees the last key."""
    left, right = named["window_size"]
    assert right == 0
    parts = []
    for (first, last), (first_key, last_key) in zip(
        pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True
    ):
        states = [query[first:last], key[first_key:last_key], value[first_key:last_key]]
        places = torch.arange(last_key - first_key)
        distance = places[first - last :, None] - places
        mask = (distance >= 0) & (distance <= (left if left >= 0 else len(places)))
        named_states = [each.transpose(0, 1) for each in states]
        rows = functional.scaled_dot_product_attention(*named_states, mask, scale=named["scale"], enable_gqa=True)
        parts.append(rows.transpose(0, 1))
    return torch.cat(parts)


def batch_of_two_steps(
    version: int, model: Path, packing: Packing, budget: int
) -> tuple[TrainBatch, dict[str, TrajectoryGroup]]:
    return make_batch(
        groups_of(version, plain_policy(model), num_groups=2),
        policy_version=version,
        tokens_per_micro_batch=budget,
        optimizer_steps=2,
        packing=packing,
    )
