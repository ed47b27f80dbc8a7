"""Calls of an agent that renders its conversation itself: token ids in, token ids and log-probs out, in the form of
vLLM's `/inference/v1/generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tandem.protos.contracts import JsonObject
from tandem.rollout.environments.agent_calls import RefusedCallError

_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TokenCall:
    """A request for the policy's next tokens. What differs from the run's sampling parameters is not read."""

    ids: NDArray[np.int32]
    """(T,): all tokens before the next turn."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """The policy's tokens, as a turn of its session: ids (T,) int32 and their log-probs (T,) float32."""

    turn: int
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: Literal["stop", "length"]


def read_token_call(body: object) -> TokenCall:
    """Reads the JSON value of a request. Raises RefusedCallError for what the policy cannot answer."""
    if not isinstance(body, dict):
        raise RefusedCallError("the request is no JSON object")
    if body.get("features") or body.get("content_parts"):
        raise RefusedCallError("features, content_parts: the policy reads text only")
    if body.get("stream"):
        raise RefusedCallError("stream: an answer of tokens comes as a whole")
    parameters = body.get("sampling_params") or {}
    if not isinstance(parameters, dict):
        raise RefusedCallError("sampling_params: an object is needed")
    if parameters.get("n") not in (None, 1):
        raise RefusedCallError("sampling_params.n: one answer a call; call again for another one")
    return TokenCall(_ids(body.get("token_ids")), _max_tokens(parameters), _stop(parameters))


def token_response(name: str, answer: TokenAnswer) -> JsonObject:
    """The answer in vLLM's form. Each log-prob names its token by its number and, as clients before vLLM 0.32 read it,
    by a text with its number.
    """
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
        for token, logprob in zip(answer.ids.tolist(), answer.logprobs.tolist(), strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": answer.ids.tolist(),
        "logprobs": {"content": content},
        "finish_reason": answer.finish_reason,
    }
    return {"request_id": f"{name}-{answer.turn}", "choices": [choice], "prompt_logprobs": None}


def check_ids(ids: NDArray[np.int32], vocabulary_size: int) -> None:
    """Raises RefusedCallError if the tokenizer knows no such token: an engine may end with one."""
    if ids.max() >= vocabulary_size:
        raise RefusedCallError(f"token_ids: {ids.max()} is no token; the tokenizer has {vocabulary_size}")


def _ids(values: object) -> NDArray[np.int32]:
    if not isinstance(values, list) or not values:
        raise RefusedCallError("token_ids: a list of at least one token is needed")
    for value in values:
        if type(value) is not int or not 0 <= value <= _LARGEST_ID:
            raise RefusedCallError(f"token_ids: {value!r:.80} is no token")
    return np.array(values, np.int32)


def _max_tokens(parameters: Mapping[str, object]) -> int | None:
    asked = parameters.get("max_tokens")
    if asked is not None and (type(asked) is not int or asked < 1):
        raise RefusedCallError(f"sampling_params.max_tokens is {asked!r:.80}; it must be a whole number of at least 1")
    return asked


def _stop(parameters: Mapping[str, object]) -> tuple[str, ...]:
    value = parameters.get("stop")
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedCallError("sampling_params.stop: a text, or a list of texts")
    return tuple(texts)
