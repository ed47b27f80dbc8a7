"""What an agent asked of the policy in one episode, and the tokens of its conversations.

A call continues the conversation whose messages it repeats: its prompt is that conversation's tokens, as they were
sampled, and what the chat template puts after them. A call with tokens continues the conversation whose tokens it
repeats. Any other call begins a conversation, which is a segment of the trajectory. So each sampled token is in the
trajectory once, after the tokens after which it was sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tandem.protos.contracts import AgentResult, JsonObject, Message
from tandem.protos.errors import EpisodeError, ModelError, TandemError, UnavailableError
from tandem.protos.types import Prompt, SamplingParameters, Segment, Trajectory
from tandem.rollout.environments.agent_calls import ChatAnswer, ChatCall, RefusedCallError, key_of
from tandem.rollout.environments.agent_tokens import TokenAnswer, TokenCall, check_ids
from tandem.rollout.environments.chat_messages import for_template
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.limits import LENGTH_STOPS, Limits, Stop, TurnTimeError, in_time, longest_turn
from tandem.rollout.environments.turn_encoder import TurnEncoder
from tandem.rollout.sampler import Sampler
from tandem.rollout.segments import unsampled, with_given

Answer = TypeVar("Answer", ChatAnswer, TokenAnswer)
_TOKENS = "tokens"  # no JSON text, as the tools of a conversation by messages are
_TOO_LONG = "context_length_exceeded"  # OpenAI's code, by which agents know that they cannot go on
_FINAL: Mapping[Stop, str] = {
    "parse_error": "policies.parse_error",
    "invalid_calls": "max_invalid_calls",
    "refused": "policies.refused",
}
"""Ends after which no call is answered, and their keys in `[environment]`."""


class AgentEncoder(TurnEncoder, Protocol):
    """The encoder of calls without tools."""

    @property
    def model_path(self) -> str:
        """Of the model whose tokenizer and chat template it has."""
        ...

    @property
    def num_tokens(self) -> int:
        """Of the tokenizer's vocabulary."""
        ...

    def with_tools(self, tools: Sequence[JsonObject]) -> TurnEncoder:
        """The encoder of calls with these tools. Raises ModelError if the template does not show them."""
        ...


@dataclass(slots=True, eq=False)
class _Conversation:
    """A conversation up to the end of a turn of the policy, or before its first turn."""

    encoder: TurnEncoder
    tools: str
    """As JSON; of a conversation by tokens, `_TOKENS`."""
    keys: list[str]
    """Of its messages (`key_of`)."""
    num_first: int
    """Messages before the first turn."""
    history: Segment
    """The newest segment."""
    num_given: int
    """Tokens of the newest segment before its first turn."""
    forked: list[Segment] = field(default_factory=list)
    """The segments before, where the chat template rewrote what was said."""
    messages: list[Message] = field(default_factory=list)
    turns: list[Message] = field(default_factory=list)
    """The policy's, with calls that cannot be read."""
    is_continued: bool = False
    """A call is being answered after it."""

    def begins(self, keys: Sequence[str], tools: str) -> bool:
        """Whether a call with these messages and tools continues it."""
        return self.tools == tools and len(keys) > len(self.keys) and [*keys[: len(self.keys)]] == self.keys

    def begins_tokens(self, ids: NDArray[np.int32], length: int) -> bool:
        """Whether a call with these tokens repeats the first `length` ones of the newest segment, and adds others."""
        return self.tools == _TOKENS and len(ids) > length and np.array_equal(ids[:length], self.history.ids[:length])

    def first_difference(self, keys: Sequence[str]) -> int:
        """Place of the first message that differs; 0 if the call does not begin like this conversation."""
        if [*keys[: self.num_first]] != self.keys[: self.num_first]:
            return 0
        same = (one == other for one, other in zip(keys, self.keys, strict=False))
        return next((place for place, is_same in enumerate(same) if not is_same), min(len(keys), len(self.keys)))


class AgentSession:
    """The calls of one run of an agent, as a trajectory. All methods belong to the sampler's event loop.

    `failed` raises the engine's error, after which the session cannot go on.
    """

    def __init__(
        self,
        sampler: Sampler,
        encoder: AgentEncoder,
        config: EnvironmentConfig,
        prompt: Prompt,
        sampling: SamplingParameters,
        trajectory_id: int,
    ) -> None:
        self.api_key = secrets.token_urlsafe(24)
        self.failed: asyncio.Future[AgentResult] = asyncio.get_running_loop().create_future()
        self.failed.add_done_callback(lambda one: one.cancelled() or one.exception())  # nobody may wait for it
        self._sampler = sampler
        self._encoder = encoder
        self._config = config
        self._prompt = prompt
        self._sampling = sampling
        self._trajectory_id = trajectory_id
        self._conversations: list[_Conversation] = []
        self._texts: dict[int, str] = {}
        """Of the sampled turns by number."""
        self._said: dict[str, tuple[Sequence[Message], int]] = {}
        """By the number of a turn that a later call can name: the conversation with it, and how many instructions."""
        self._messages: Sequence[Message] = prompt.messages
        """The conversation with the newest turn."""
        self._num_turns = 0
        self._num_first_given = 0
        """Tokens of the first prompt."""
        self._stop: Stop | None = None
        self._calls: set[asyncio.Task[ChatAnswer] | asyncio.Task[TokenAnswer]] = set()
        self._idle_seconds = config.step_seconds
        self._idle_until = time.monotonic() + config.step_seconds

    @property
    def has_reached_limit(self) -> bool:
        return self._stop is not None

    def seconds_left(self) -> float:
        """How long the agent may go on without a call, unless one is being answered: then the whole time."""
        return self._config.step_seconds if self._calls else self._idle_until - time.monotonic()

    @property
    def model_path(self) -> str:
        return self._encoder.model_path

    def said(self, turn: str) -> Sequence[Message]:
        """The messages up to and with the turn of this number, without the instructions at their start. Raises
        RefusedCallError if no call can name such a turn.
        """
        if turn not in self._said:
            told = f"this session has not given the response {turn!r:.80}"
            raise RefusedCallError(told, code="previous_response_not_found")
        messages, num_instructions = self._said[turn]
        return messages[num_instructions:]

    def answering(self, call: ChatCall) -> asyncio.Task[ChatAnswer]:
        """A task that answers a call. It raises RefusedCallError, also if the policy cannot answer any more; the end of
        the session cancels it.
        """
        return self._begun(self._answer(call))

    def answering_tokens(self, call: TokenCall) -> asyncio.Task[TokenAnswer]:
        """As `answering`."""
        return self._begun(self._answer_tokens(call))

    def _begun(self, answer: Coroutine[object, object, Answer]) -> asyncio.Task[Answer]:
        if not self._calls:
            self._idle_seconds = self.seconds_left()
        task = asyncio.create_task(answer)
        self._calls.add(task)

        def ended(task: asyncio.Task[Answer]) -> None:
            self._calls.discard(task)
            if not task.cancelled() and task.exception() is None:  # a refused call gains no time
                self._idle_seconds = self._config.step_seconds
            if not self._calls:
                self._idle_until = time.monotonic() + self._idle_seconds

        task.add_done_callback(ended)
        return task

    def note_refusal(self, error: RefusedCallError) -> None:
        """A call got this error. If the recipe says so, it ends the episode, unless a limit explains it."""
        if self._config.policies.refused != "observation" and error.status == 400 and error.code != _TOO_LONG:
            self._stop = "refused"

    def end_by_time(self) -> AgentResult:
        """What an agent has whose episode ends by `environment.episode_seconds`."""
        self._stop = "episode_time"
        return AgentResult(0.0)

    def end(self) -> None:
        """Ends the calls that are being answered: their turns are not part of the trajectory."""
        for task in self._calls:
            task.cancel()

    def trajectory(self, result: AgentResult) -> Trajectory:
        """The episode with its reward, on a run that has ended."""
        segments = [segment for one in self._conversations for segment in (*one.forked, one.history)]
        stop = self._stop or "terminated"
        return Trajectory(
            self._trajectory_id,
            "policy",
            tuple(segments) or (unsampled(self._prompt.token_ids),),
            "length" if stop in LENGTH_STOPS else "stop",
            "\n".join(self._texts[turn] for turn in sorted(self._texts)),
            self._sampling,
            earned_reward=result.reward,
            metadata={
                "stop": stop,
                "num_turns": len(self._texts),
                "messages": self._messages,
                "info": {**result.info, "error": result.error} if result.error else result.info,
                "resumed_at": [],
            },
        )

    async def _answer(self, call: ChatCall) -> ChatAnswer:
        self._check_turns()
        try:
            conversation, history = self._before_turn(call)
        except (EpisodeError, ModelError) as error:
            raise RefusedCallError(str(error)) from None
        turn, row = await self._next_turn(call, conversation, history)
        ids = conversation.history.ids[len(history.ids) :]
        is_cut = row.finish_reason == "length"  # it may lack its most important part
        message: Message = {"role": "assistant", "content": row.text}
        if not is_cut and call.may_call:
            decoded = conversation.encoder.decode_turn(ids, row.text, turn)
            conversation.turns.append(decoded)
            names = {schema["function"]["name"] for schema in call.tools}
            self._stop = self._stop or Limits(self._config).after_turn(conversation.turns, names)
            if not any("error" in one for one in decoded.get("tool_calls", ())):
                message = decoded
        self._add(conversation, [*call.messages, message], turn, row.text)
        conversation.keys = [key_of(one) for one in conversation.messages]
        if call.num_instructions is not None:
            self._said[f"{turn}"] = conversation.messages, call.num_instructions
        finish: Literal["stop", "tool_calls"] = "tool_calls" if message.get("tool_calls") else "stop"
        return ChatAnswer(turn, message, "length" if is_cut else finish, len(history.ids), len(ids))

    async def _answer_tokens(self, call: TokenCall) -> TokenAnswer:
        self._check_turns()
        check_ids(call.ids, self._encoder.num_tokens)
        conversation, history = self._before_tokens(call.ids)
        turn, row = await self._next_turn(call, conversation, history)
        before = conversation.messages or self._prompt.messages  # what came between two turns is known as tokens only
        self._add(conversation, [*before, {"role": "assistant", "content": row.text}], turn, row.text)
        sampled, start = conversation.history, len(history.ids)
        finish: Literal["stop", "length"] = "length" if row.finish_reason == "length" else "stop"
        return TokenAnswer(turn, sampled.ids[start:], sampled.behavior_logprobs[start:], finish)

    def _check_turns(self) -> None:
        if self._num_turns == self._config.max_turns:
            self._stop = "turns"
            told = f"the episode has had its {self._num_turns} turns (environment.max_turns)"
            raise RefusedCallError(told, code=_TOO_LONG)
        if (key := self._stop and _FINAL.get(self._stop)) is not None:
            told = f"the episode has ended by {self._stop!r} (environment.{key})"
            raise RefusedCallError(told, code=_TOO_LONG)

    async def _next_turn(
        self, call: ChatCall | TokenCall, conversation: _Conversation, history: Segment
    ) -> tuple[int, Trajectory]:
        """Samples the turn after `history`, which becomes the newest segment of the conversation. Returns its number,
        and what was sampled.
        """
        forks = not history.spans and bool(conversation.history.spans)
        num_given = len(history.ids) if forks else conversation.num_given
        longest, limit = self._longest_turn(conversation, len(history.ids), num_given)
        turn, self._num_turns = self._num_turns, self._num_turns + 1
        with _continued(conversation):
            row = await self._sample(call, history, turn, longest)
        if forks:
            conversation.forked.append(conversation.history)
        (conversation.history,) = row.segments
        conversation.num_given = num_given
        if self._stop not in ("turns", *_FINAL):  # of another call, which came meanwhile
            is_cut = row.finish_reason == "length" and not (call.max_tokens and call.max_tokens < longest)
            self._stop = limit if is_cut else None
        return turn, row

    def _add(self, conversation: _Conversation, messages: list[Message], turn: int, text: str) -> None:
        if conversation not in self._conversations:
            self._conversations.append(conversation)
        conversation.messages = messages
        self._messages = conversation.messages
        self._texts[turn] = text

    def _before_turn(self, call: ChatCall) -> tuple[_Conversation, Segment]:
        """The conversation that a call continues or begins, and all tokens before the next turn."""
        keys, tools = [key_of(message) for message in call.messages], json.dumps(call.tools, sort_keys=True)
        idle = [one for one in self._conversations if not one.is_continued and one.begins(keys, tools)]
        if idle:
            known = max(idle, key=lambda one: len(one.keys))
            return known, self._continuing(known, call)
        if self._config.rewritten_history == "keep":
            self._check_no_rewriting(call, keys)
        encoder = self._encoder.with_tools(call.tools) if call.tools else self._encoder
        history = unsampled(encoder.encode(for_template(call.messages)))
        return _Conversation(encoder, tools, keys, len(keys), history, num_given=len(history.ids)), history

    def _before_tokens(self, ids: NDArray[np.int32]) -> tuple[_Conversation, Segment]:
        """As `_before_turn`, for a call with tokens."""
        known = [one for one in self._conversations if one.begins_tokens(ids, one.num_given)]
        idle = [one for one in known if not one.is_continued and one.begins_tokens(ids, len(one.history.ids))]
        if idle:
            longest = max(idle, key=lambda one: len(one.history.ids))
            return longest, with_given(longest.history, ids[len(longest.history.ids) :])
        if known and self._config.rewritten_history == "keep":
            raise RefusedCallError(
                "the call repeats the first tokens of a conversation, and then differs from it, or another call is "
                "being answered after the same tokens. That would begin a new segment, which needs "
                'environment.rewritten_history = "fork"'
            )
        history = unsampled(ids)
        return _Conversation(self._encoder, _TOKENS, [], 0, history, num_given=len(ids)), history

    def _continuing(self, known: _Conversation, call: ChatCall) -> Segment:
        """All tokens before the next turn of a conversation. Without the tokens sampled so far, it is a new segment."""
        ids = known.history.ids
        if self._config.rewritten_history == "keep":
            new = call.messages[len(known.keys) :]
            return with_given(known.history, known.encoder.encode_reply(new, int(ids[-1])))
        conversation = for_template(call.messages)
        increment = known.encoder.encode_increment(conversation, ids)
        if increment is not None:
            return with_given(known.history, increment)
        return unsampled(known.encoder.encode(conversation))

    def _check_no_rewriting(self, call: ChatCall, keys: Sequence[str]) -> None:
        """Refuses a call that begins like a recorded conversation, goes on with an answer, and does not continue it."""
        for one in self._conversations:
            place = one.first_difference(keys)
            if place and len(keys) > one.num_first and call.messages[one.num_first]["role"] == "assistant":
                raise RefusedCallError(
                    f"the call repeats {place} messages of a conversation, and then differs from it, or has other "
                    "tools, or another call is being answered after the same messages. That would begin a new "
                    'segment, which needs environment.rewritten_history = "fork"'
                )

    def _longest_turn(self, conversation: _Conversation, num_tokens: int, num_given: int) -> tuple[int, Stop]:
        """The most tokens that the next turn may have, and that limit. Raises RefusedCallError if there are none."""
        others = 0
        if self._config.rewritten_history == "keep":  # room in Redis is kept for one segment of the greatest length
            num_given = self._num_first_given = self._num_first_given or num_given
            others = sum(len(one.history.ids) for one in self._conversations if one is not conversation)
        in_model = self._sampler.max_model_tokens - (others + num_tokens)
        segments = [segment for one in self._conversations for segment in (*one.forked, one.history)]
        num_sampled = sum(int(segment.loss_mask.sum()) for segment in segments)
        in_episode = self._sampling.max_tokens - max(others + num_tokens - num_given, num_sampled)
        if min(in_model, in_episode) < 1:
            self._stop = longest_turn(in_episode, in_model)[1]
            limit = "rollout.max_response_tokens"
            limit = f"data.max_prompt_tokens + {limit}" if in_model < in_episode else limit
            raise RefusedCallError(f"{num_tokens + others} tokens leave none for an answer ({limit})", code=_TOO_LONG)
        return longest_turn(in_episode, in_model, self._config.max_turn_tokens)

    async def _sample(self, call: ChatCall | TokenCall, history: Segment, turn: int, longest: int) -> Trajectory:
        group_id, base = self._prompt.group_id, self._sampling
        try:
            async with in_time(self._config.turn_seconds or None, "turn_time"):
                row = await self._sampler.sample_one(
                    history,
                    replace(base, max_tokens=min(longest, call.max_tokens or longest), stop=(*base.stop, *call.stop)),
                    trajectory_id=self._trajectory_id,
                    key=f"{group_id}/{turn}",
                )
            if row.finish_reason in ("abort", "error"):
                raise UnavailableError(f"the engine ended turn {turn} of {group_id} with {row.finish_reason!r}")
        except TurnTimeError as error:
            self._stop = error.stop
            told = f"the turn was not sampled within {self._config.turn_seconds:g} s (environment.turn_seconds)"
            raise RefusedCallError(told, code=_TOO_LONG) from None
        except TandemError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise RefusedCallError("the policy cannot be sampled any more", status=503) from None
        return row


@contextlib.contextmanager
def _continued(conversation: _Conversation) -> Iterator[None]:
    conversation.is_continued = True
    try:
        yield
    finally:
        conversation.is_continued = False
