"""A language model that answers with the statistics of its loss tokens instead of its logits, also where ZeRO-3 spreads
its weights.

Under ZeRO-3 a module's weights are whole only while the module itself runs, forward or backward: whoever takes the
head's weight from outside finds it empty. So the head is replaced by one that computes the statistics itself, sharing
its parameters under their names, and the model's `forward` learns to ask it. Both happen before the engine is built;
nothing else about the model changes.

B lines, T columns, K columns whose logits matter, N loss tokens, H hidden size (see trainer/batch/micro_batch.py).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.models.token_logprobs import TokenStatistics, statistics_from_logits, token_statistics


class TokenHead(nn.Linear):
    """An output head; given targets it returns their `TokenStatistics` and never all logits."""

    def forward(
        self,
        input: Tensor,
        target_N: Tensor | None = None,
        temperature_N: Tensor | None = None,
        *,
        entropy: bool = False,
        squared_probs: bool = False,
    ) -> Any:
        """Without targets the logits, as before."""
        if target_N is None:
            return super().forward(input)
        assert temperature_N is not None
        return token_statistics(
            input, self.weight, self.bias, target_N, temperature_N, entropy=entropy, squared_probs=squared_probs
        )


def add_token_statistics(model: transformers.PreTrainedModel) -> None:
    """From now on `model(tokens=batch, entropy=…, squared_probs=…)` gives the `TokenStatistics` of a micro-batch's N
    loss tokens.

    Every other call is as it was. A model whose logits are more than its head's output (soft caps, scales), or whose
    head is no plain linear layer, is asked for its logits.
    """
    if _logits_are_the_heads(model):
        linear = model.get_output_embeddings()
        head = TokenHead(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias = linear.weight, linear.bias
        model.set_output_embeddings(head.train(linear.training))
    model.forward = MethodType(_forward, model)
    model.gives_token_statistics = True


def _forward(
    self: Any,
    *arguments: Any,
    tokens: MicroBatch | None = None,
    entropy: bool = False,
    squared_probs: bool = False,
    **named: Any,
) -> Any:
    if tokens is None:
        return type(self).forward(self, *arguments, **named)
    asked = {"entropy": entropy, "squared_probs": squared_probs}
    head = self.get_output_embeddings()
    if isinstance(head, TokenHead):
        hidden_BTH = self.base_model(**tokens.inputs, use_cache=False).last_hidden_state
        hidden_NH = hidden_BTH[tokens.row_N, tokens.columns_K[tokens.column_N]]
        return head(hidden_NH, tokens.target_N, tokens.temperature_N, **asked)
    logits_BKV = type(self).forward(self, **tokens.inputs, use_cache=False, logits_to_keep=tokens.columns_K).logits
    logits_NV = logits_BKV[tokens.row_N, tokens.column_N]
    return statistics_from_logits(logits_NV, tokens.target_N, tokens.temperature_N, **asked)


@torch.no_grad()
def _logits_are_the_heads(model: transformers.PreTrainedModel) -> bool:
    # Tried out on two tokens: every architecture names its caps and scales differently.
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return False
    ids_BT = torch.arange(2, device=head.weight.device)[None]
    hidden_BTH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    expected_BTV = head(hidden_BTH)
    return expected_BTV.shape == logits_BTV.shape and torch.allclose(expected_BTV, logits_BTV, rtol=1e-3, atol=1e-5)


def loss_token_statistics(
    model: nn.Module | TrainingEngine, batch: MicroBatch, *, entropy: bool = False, squared_probs: bool = False
) -> TokenStatistics:
    """The statistics of a micro-batch's N loss tokens, from any language model or the engine around one.

    A model that `add_token_statistics` has not seen is asked for its logits, all at once.
    """
    asked = {"entropy": entropy, "squared_probs": squared_probs}
    module = model.module if isinstance(model, TrainingEngine) else model
    if getattr(module, "gives_token_statistics", False):
        return TokenStatistics(*model(tokens=batch, **asked))
    logits_BKV = model(**batch.inputs, use_cache=False, logits_to_keep=batch.columns_K).logits
    return statistics_from_logits(logits_BKV[batch.row_N, batch.column_N], batch.target_N, batch.temperature_N, **asked)


def token_logprobs(model: nn.Module | TrainingEngine, batch: MicroBatch) -> Tensor:
    """log π(token | what comes before it) of the N loss tokens."""
    return loss_token_statistics(model, batch).logprobs_N
