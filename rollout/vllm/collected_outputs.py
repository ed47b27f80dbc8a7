"""Collects the tokens of a request in the engine's process, so that the sampler's process gets one message for them.

By default, vLLM sends every token by itself, and the sampler's process spends as much time on a token as a small model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

SAMPLED_LOGPROBS = "tandem_sampled_logprobs"
"""Key of an output's `kv_transfer_params`, which may hold anything: the log-probs of its tokens, without candidates.
Three arrays for each output would take longer to send than the rest of it.
"""


class CollectedOutputs:
    """Outputs of requests that have not finished and whose client looks at nothing before their end."""

    def __init__(self) -> None:
        self._by_request: dict[str, list[EngineCoreOutput]] = {}

    def add(self, outputs: Sequence[EngineCoreOutput], requests: Mapping[str, Request]) -> list[EngineCoreOutput]:
        """Keeps the outputs of one step that can wait. Returns the others, each with what was kept of its request."""
        ready = []
        for output in outputs:
            request_id = output.request_id
            if output.finished:
                ready.append(_joined([*self._by_request.pop(request_id, ()), output]))
            elif (kept := self._by_request.get(request_id)) is not None:
                kept.append(output)
            elif _can_wait(requests[request_id]):
                self._by_request[request_id] = [output]
            else:
                ready.append(output)
        return ready

    def take_all(self) -> list[EngineCoreOutput]:
        """Returns what is kept, one output a request, and keeps nothing."""
        kept, self._by_request = self._by_request, {}
        return [_joined(outputs) for outputs in kept.values()]

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._by_request.pop(request_id, None)


def _can_wait(request: Request) -> bool:
    params = request.sampling_params
    # Stop strings are found in the sampler's process, from the decoded tokens.
    return params is not None and params.output_kind.name == "FINAL_ONLY" and not params.detokenize


def _joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """The last output with the tokens of all."""
    last = outputs[-1]
    last.new_token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
    last.prefill_stats = outputs[0].prefill_stats
    if logprobs := [output.new_logprobs for output in outputs if output.new_logprobs is not None]:
        # A step has as many candidates as the request of it that asked for the most.
        width = min(one[0].shape[1] for one in logprobs)
        if width == 1:
            sampled = [value for one in logprobs for value in one[1][:, 0].tolist()]
            last.new_logprobs, last.kv_transfer_params = None, {SAMPLED_LOGPROBS: sampled}
        else:
            columns = zip(*((one[0][:, :width], one[1][:, :width], one[2]) for one in logprobs), strict=True)
            last.new_logprobs = type(logprobs[0])(*map(np.concatenate, columns))
    return last
