"""Batches of rows: one forward pass samples the next token of each row.

Shapes: `B` rows, `T` tokens in the KV cache (prompts are padded on the left), `V` vocabulary.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from tandem.protos.errors import ModelError
from tandem.protos.types import FinishReason, SamplingMask, VersionSpan
from tandem.rollout.sampler import Completion, SamplingRequest

_SILENT_TOKENS = 16  # special tokens (decoded to "") that may lie between the parts of a stop string


@dataclass(eq=False)
class Row:
    """One request and its answer so far. `token_ids` begins with the request's `sampled_ids`; the others do not."""

    request: SamplingRequest
    future: Future[Completion] = field(default_factory=Future)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)
    """The sampling mask, if it is recorded: the tokens that were left for each of the log-probs."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids.extend(self.request.sampled_ids)
        self.random = random.Random(self.request.seed)
        for _ in self.token_ids:  # one number a token
            self.random.random()

    def append(self, token_id: int, logprob: float, version: tuple[int, int]) -> None:
        """Adds a token that was sampled under this incarnation and policy version."""
        if not self.spans or (self.spans[-1].incarnation, self.spans[-1].policy_version) != version:
            self.spans.append(VersionSpan(len(self.logprobs), *version))
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)

    def completion(self) -> Completion:
        token_ids = self.token_ids[len(self.request.sampled_ids) :]
        mask = _sampling_mask(self.kept_ids) if self.request.sampling.records_mask else None
        return Completion(token_ids, [*self.logprobs], [*self.spans], self.finish_reason or "abort", mask)


class LanguageModel:
    """The model and its tokenizer, as a batch needs them."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        end_ids = model.generation_config.eos_token_id if model.generation_config is not None else None
        self._end_ids = {*(end_ids if isinstance(end_ids, list) else [end_ids]), tokenizer.eos_token_id}
        accepted = inspect.signature(model.forward).parameters
        if "past_key_values" not in accepted:
            raise ModelError(f"{type(model).__name__} has no KV cache that the engine transformers can use")
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._takes_positions = "position_ids" in accepted

    def next_token_logits(self, input_ids: Tensor, mask_BT: Tensor, cache: DynamicCache) -> Tensor:
        """float32 (B, V); appends the inputs to the cache."""
        options: dict[str, Tensor | int] = dict(self._options)
        if self._takes_positions:
            positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
            options["position_ids"] = positions_BT[:, -input_ids.shape[1] :]
        output = self.model(
            input_ids=input_ids, attention_mask=mask_BT, past_key_values=cache, use_cache=True, **options
        )
        logits_BV: Tensor = output.logits[:, -1].float()
        return logits_BV

    def finish_reason(self, row: Row) -> FinishReason | None:
        """Returns why the row ends with its newest token; None if it continues."""
        sampling = row.request.sampling
        if row.token_ids[-1] in self._end_ids:
            return "stop"
        if sampling.stop:
            # Every token that does not decode to "" covers at least one byte of the string.
            newest = max(len(text.encode()) for text in sampling.stop) + _SILENT_TOKENS
            text = self.tokenizer.decode(row.token_ids[-newest:], skip_special_tokens=True)
            if any(stop in text for stop in sampling.stop):
                return "stop"
        return "length" if len(row.token_ids) == sampling.max_tokens else None


class Batch:
    """Rows that make steps together. Creating it reads each prompt once and samples the first tokens."""

    def __init__(self, language_model: LanguageModel, rows: Sequence[Row], version: tuple[int, int]) -> None:
        self._language_model = language_model
        self.rows = list(rows)
        device = language_model.model.device
        row_prompts = [tuple(row.request.known_ids) for row in rows]
        prompts = list(dict.fromkeys(row_prompts))
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        self._cache = DynamicCache(config=language_model.model.config)
        logits = language_model.next_token_logits(input_ids, mask, self._cache)
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        index = torch.tensor([numbers[prompt] for prompt in row_prompts], device=device)
        self._cache.reorder_cache(index)
        self._mask_BT = mask[index]
        self._sample(logits[index], version)

    @property
    def is_mergeable(self) -> bool:
        """Whether its cache can be padded. Batches with sliding windows or recurrent states cannot be merged."""
        return all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def step(self, version: tuple[int, int]) -> None:
        newest = torch.tensor([[row.token_ids[-1]] for row in self.rows], device=self._mask_BT.device)
        self._mask_BT = torch.nn.functional.pad(self._mask_BT, (0, 1), value=1)
        self._sample(self._language_model.next_token_logits(newest, self._mask_BT, self._cache), version)

    def remove_ended(self) -> list[Row]:
        """Removes and returns the rows that have finished or were cancelled."""
        goes_on = [row.finish_reason is None and not row.future.cancelled() for row in self.rows]
        ended = [row for row, stays in zip(self.rows, goes_on, strict=True) if not stays]
        if ended:
            kept = [number for number, stays in enumerate(goes_on) if stays]
            self.rows = [self.rows[number] for number in kept]
            if kept:  # an empty batch is dropped
                index = torch.tensor(kept, dtype=torch.long, device=self._mask_BT.device)
                self._cache.reorder_cache(index)
                self._mask_BT = self._mask_BT[index]
        return ended

    def merge(self, other: Batch) -> None:
        """Adds the rows of another batch. Both must be mergeable."""
        num_tokens = int(max(batch._mask_BT.sum(-1).max() for batch in (self, other)))
        self._mask_BT = torch.cat([_last(batch._mask_BT, num_tokens) for batch in (self, other)])
        for mine, theirs in zip(self._cache.layers, other._cache.layers, strict=True):
            mine.keys = torch.cat([_last(layer.keys, num_tokens) for layer in (mine, theirs)])
            mine.values = torch.cat([_last(layer.values, num_tokens) for layer in (mine, theirs)])
        self.rows += other.rows

    def _sample(self, logits_BV: Tensor, version: tuple[int, int]) -> None:
        samplings = [row.request.sampling for row in self.rows]
        temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=logits_BV.device)
        scaled_BV = logits_BV / temperatures[:, None]
        for number, row in enumerate(self.rows):
            sampling = row.request.sampling
            if sampling.truncates or sampling.repetition_penalty != 1.0:
                scaled_BV[number] = _truncated(row, scaled_BV[number])
            if sampling.records_mask:
                row.kept_ids.append(scaled_BV[number].isfinite().nonzero()[:, 0].tolist())
        logprobs_BV = scaled_BV.log_softmax(-1)
        sums_BV = logprobs_BV.double().exp().cumsum(-1)
        drawn = torch.tensor([row.random.random() for row in self.rows], dtype=torch.double, device=sums_BV.device)
        token_ids = torch.searchsorted(sums_BV, (drawn * sums_BV[:, -1])[:, None], right=True)[:, 0]
        greedy = torch.tensor([sampling.temperature == 0 for sampling in samplings], device=token_ids.device)
        token_ids = torch.where(greedy, scaled_BV.argmax(-1), token_ids.clamp(max=sums_BV.shape[-1] - 1))
        logprobs = logprobs_BV.gather(1, token_ids[:, None])[:, 0]
        for row, token_id, logprob in zip(self.rows, token_ids.tolist(), logprobs.tolist(), strict=True):
            row.append(token_id, logprob, version)
            row.finish_reason = self._language_model.finish_reason(row)


def _truncated(row: Row, scores_V: Tensor) -> Tensor:
    """Applies repetition penalty, min-p, top-k and top-p in vLLM's order."""
    sampling = row.request.sampling
    scores = scores_V[None]
    input_ids = torch.empty(1, 0, dtype=torch.long, device=scores.device)  # only penalties read it
    if sampling.repetition_penalty != 1.0:
        input_ids = torch.tensor([[*row.request.prompt_ids.tolist(), *row.token_ids]], device=scores.device)
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(input_ids, scores)
    if sampling.min_p > 0.0:
        scores = MinPLogitsWarper(sampling.min_p)(input_ids, scores)
    if 0 < sampling.top_k < scores.shape[-1]:
        top = scores.topk(sampling.top_k)  # exactly so many, also where the last of them has equals
        scores = torch.full_like(scores, -torch.inf).scatter(1, top.indices, top.values)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(input_ids, scores)
    return scores[0]


def _sampling_mask(kept_ids: Sequence[Sequence[int]]) -> SamplingMask:
    ids = np.fromiter(itertools.chain.from_iterable(kept_ids), np.int32)
    return SamplingMask(ids, np.array([len(one) for one in kept_ids], np.int32))


def _last(tensor: Tensor, num_tokens: int) -> Tensor:
    """Returns the last tokens of (B, T) or (B, heads, T, size), padded with zeros on the left if there are fewer."""
    missing = num_tokens - tensor.shape[1 if tensor.ndim == 2 else 2]
    return torch.nn.functional.pad(tensor, (missing, 0) if tensor.ndim == 2 else (0, 0, missing, 0))  # negative: cut
