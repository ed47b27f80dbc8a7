"""A sampler that says given words, and the prompts and the chat template of its episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tandem.protos.types import FinishReason, Prompt, SamplingParameters, Segment, Trajectory, VersionSpan
from tandem.rollout.sampler import Completion, Sampler, SamplingRequest
from tandem.services.data.chat import ChatEncoder
from tests.support.tiny_model import CHAT_TEMPLATE, EOS_ID, build_tiny_model, character_tokenizer

SAMPLING = SamplingParameters(max_tokens=400)
PROMPT = [{"role": "system", "content": "Repeat."}]


@cache
def tokenizer() -> Any:
    return character_tokenizer()


def chat_encoder(folder: Path) -> ChatEncoder:
    """Of a template that refuses messages of tools."""
    no_tools = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    return ChatEncoder(str(build_tiny_model(folder, chat_template=no_tools + CHAT_TEMPLATE)))


class ScriptedSampler(Sampler):
    """Says the words of each trajectory, one a turn, each with log-probs of its own. Weights change every other turn.

    `stops_at`: a turn that it never ends, and how many tokens it samples of it.
    """

    def __init__(
        self,
        words: Callable[[int], Sequence[str]],
        finish: FinishReason = "stop",
        stops_at: tuple[int, int] | None = None,
        first_version: int = 0,
        own_tokenizer: Any = None,
    ) -> None:
        self.tokenizer = own_tokenizer or tokenizer()
        super().__init__(self.tokenizer, max_model_tokens=1000, seed=3)
        self._encode, self._words, self._finish, self._stops_at = tokenizer().encode, words, finish, stops_at
        self._first_version = first_version
        self.requests: list[SamplingRequest] = []
        self.begun: dict[str, Completion] = {}
        """What is sampled of turns that do not end, by request id."""

    is_dead = False

    async def check(self) -> None: ...
    def close(self) -> None: ...
    async def _start_transfer(self, *_: object) -> None: ...
    async def _transfer_progress(self, *_: object) -> Any: ...

    async def _generate(self, request: SamplingRequest) -> Completion:
        self.requests.append(request)
        key, number, _ = request.request_id.rsplit("/", 2)
        turn = int(key.rpartition("/")[2])
        words = self._words(int(number))
        ids = [*self._encode(words[turn]), EOS_ID][: request.sampling.max_tokens]
        ended, first = ids[-1] == EOS_ID, len(request.sampled_ids)
        assert ids[:first] == [*request.sampled_ids], "a turn goes on as it began"
        logprobs = [-(turn + 1) - place / 100 for place in range(len(ids))]
        spans = [VersionSpan(0, 1, self._first_version + turn // 2)]
        if self._stops_at is not None and self._stops_at[0] == turn:
            last = self._stops_at[1]
            self.begun[request.request_id] = Completion(ids[:last], logprobs[:last], spans, "abort")
            await asyncio.Event().wait()
        return Completion(ids[first:], logprobs[first:], spans, self._finish if ended else "length")

    async def _sampled_so_far(self, request_ids: Collection[str]) -> Mapping[str, Completion]:
        return {request_id: self.begun[request_id] for request_id in request_ids if request_id in self.begun}


def prompt_of(index: int = 0) -> Prompt:
    text = tokenizer().apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    ids = np.array(tokenizer().encode(text, add_special_tokens=False), np.int32)
    return Prompt(0, index, ids, 4, SAMPLING, "echo", messages=tuple(PROMPT), ground_truth=str(index % 15 + 1))


def sampled_parts(segment: Segment) -> list[tuple[int, int]]:
    """Start and end of each turn."""
    edges = np.flatnonzero(np.diff(segment.loss_mask, prepend=0, append=0).astype(bool))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def texts_of(row: Trajectory) -> list[list[str]]:
    """The sampled texts of each segment."""
    return [
        [tokenizer().decode(one.ids[start:end].tolist()) for start, end in sampled_parts(one)] for one in row.segments
    ]
