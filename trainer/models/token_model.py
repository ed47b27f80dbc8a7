"""Makes a language model return the statistics of its loss tokens instead of all logits, also with partitioned weights.

Under ZeRO-3 and FSDP a module's weights are whole only while the module itself runs. Before the engine is built, the
output head is therefore replaced by one with the same parameters and names that computes the statistics itself.

B lines, T columns, K columns whose logits are needed, N loss tokens, H hidden size (see trainer/batch/micro_batch.py).
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.batch.kept_tokens import KeptTokens
from tandem.trainer.batch.micro_batch import MicroBatch
from tandem.trainer.models.token_logprobs import TokenStatistics, statistics_from_logits, token_statistics


class TokenHead(nn.Linear):
    """An output head. It returns the `TokenStatistics` of targets without storing all logits, or the logits if there
    are no targets.
    """

    def forward(
        self,
        input: Tensor,
        target_N: Tensor | None = None,
        temperature_N: Tensor | None = None,
        kept: KeptTokens | None = None,
        *,
        entropy: bool = False,
        squared_probs: bool = False,
    ) -> Any:
        if target_N is None:
            return super().forward(input)
        assert temperature_N is not None
        arguments = input, self.weight, self.bias, target_N, temperature_N, kept
        return token_statistics(*arguments, entropy=entropy, squared_probs=squared_probs)


def add_token_statistics(model: transformers.PreTrainedModel) -> None:
    """Makes `model(tokens=batch, entropy=…, squared_probs=…)` return the `TokenStatistics` of a micro-batch's N loss
    tokens. Other calls behave as before. A model stays as it is if its head is no plain linear layer or it changes its
    logits afterwards (soft caps, scales).
    """
    if _head_gives_logits(model):
        linear = model.get_output_embeddings()
        head = TokenHead(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias = linear.weight, linear.bias
        model.set_output_embeddings(head.train(linear.training))
        model.forward = MethodType(_forward, model)


def _forward(self: Any, *arguments: Any, tokens: MicroBatch | None = None, **named: Any) -> Any:
    if tokens is None:
        return type(self).forward(self, *arguments, **named)
    hidden_BTH = self.base_model(**tokens.inputs, use_cache=False).last_hidden_state
    hidden_NH = hidden_BTH[tokens.row_N, tokens.columns_K[tokens.column_N]]
    return self.get_output_embeddings()(hidden_NH, tokens.target_N, tokens.temperature_N, tokens.kept, **named)


@torch.no_grad()
def _head_gives_logits(model: transformers.PreTrainedModel) -> bool:
    # Tests two tokens, because every architecture names its caps and scales differently.
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
    """The statistics of a micro-batch's N loss tokens, from a language model or an engine; computed from the logits if
    the model's head is no `TokenHead` (see `add_token_statistics`) or has adapters.
    """
    asked = {"entropy": entropy, "squared_probs": squared_probs}
    module: Any = model.module if isinstance(model, TrainingEngine) else model
    if isinstance(module.get_output_embeddings(), TokenHead):
        return TokenStatistics(*model(tokens=batch, **asked))
    logits_BKV = model(**batch.inputs, use_cache=False, logits_to_keep=batch.columns_K).logits
    logits_NV = logits_BKV[batch.row_N, batch.column_N]
    return statistics_from_logits(logits_NV, batch.target_N, batch.temperature_N, batch.kept, **asked)


def token_logprobs(model: nn.Module | TrainingEngine, batch: MicroBatch) -> Tensor:
    """log π(token | preceding tokens) of the N loss tokens, over the tokens that truncation left."""
    return loss_token_statistics(model, batch).logprobs_N
