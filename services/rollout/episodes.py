"""Episodes of the rollout service: the recipe's environment, and the model's chat template between its turns."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tandem.protos import rollout_pb2
from tandem.protos.contracts import JsonObject, Message
from tandem.protos.errors import ConfigError, DataError, EpisodeError, ModelError
from tandem.protos.extras import missing_extra_named
from tandem.protos.types import Prompt, SamplingParameters
from tandem.rollout.engine import find_engine
from tandem.rollout.environments.agent_episodes import AgentSampler
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.rollout.environments.source import EnvironmentSource
from tandem.rollout.environments.tools.parsers import ParsedTurn, ToolFormat, TurnPiece, find_format, parse_turn
from tandem.rollout.sampler import Sampler
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.config.eval_sets import NO_ENVIRONMENT
from tandem.services.data.chat import ChatEncoder, RefusedPromptError
from tandem.services.data.dataset import RowFault, parse_row
from tandem.services.rollout.environment_services import EnvironmentServices

_REPLIES = 1024
_SHORT_CHARACTERS = 256
_TOOL_SETS = 64  # of agents, which name their tools in every call


class EpisodeEncoder:
    """The model's chat template. Messages that it refuses are a fault of the environment that sent them.

    Raises ModelError if the encoder has tools and the format of their calls is unknown.
    """

    def __init__(self, encoder: ChatEncoder, tool_format: str = "auto") -> None:
        self._encoder = encoder
        self._tool_format = tool_format
        self._with_tools = lru_cache(_TOOL_SETS)(self._decoded_tools)
        self._short_reply = lru_cache(_REPLIES)(self._decoded_reply)
        self._parse = _parser_of(encoder, tool_format) if encoder.tools else None

    @property
    def shows_tools(self) -> bool:
        return bool(self._encoder.tools)

    @property
    def model_path(self) -> str:
        return self._encoder.model_path

    @property
    def num_tokens(self) -> int:
        return self._encoder.num_tokens

    def with_tools(self, tools: Sequence[JsonObject]) -> EpisodeEncoder:
        """As of `AgentEncoder`. Encoders are kept."""
        return self._with_tools(json.dumps(tools))

    def _decoded_tools(self, text: str) -> EpisodeEncoder:
        encoder = self._encoder.with_tools(json.loads(text))
        encoder.check_replies(may_rewrite=True)  # of histories, which the start has checked
        return EpisodeEncoder(encoder, self._tool_format)

    def encode(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        try:
            return self._encoder.encode(messages)
        except RefusedPromptError as error:
            raise EpisodeError(f"the chat template refuses the conversation: {error}") from None

    def encode_reply(self, messages: Sequence[Message], last_token: int) -> NDArray[np.int32]:
        """As of `TurnEncoder`. Short replies are kept: games and errors of tools repeat them."""
        text = json.dumps(messages)
        try:
            if len(text) <= _SHORT_CHARACTERS:
                return self._short_reply(text, last_token)
            return self._encoder.encode_reply(messages, last_token)
        except RefusedPromptError as error:
            raise EpisodeError(f"the chat template refuses the messages of step: {error}") from None

    def encode_increment(self, messages: Sequence[Message], ids: NDArray[np.int32]) -> NDArray[np.int32] | None:
        try:
            return self._encoder.encode_increment(messages, ids)
        except RefusedPromptError as error:
            raise EpisodeError(f"the chat template refuses the conversation: {error}") from None

    def _decoded_reply(self, text: str, last_token: int) -> NDArray[np.int32]:
        ids = self._encoder.encode_reply(json.loads(text), last_token)
        ids.flags.writeable = False  # several episodes get it
        return ids

    def decode_turn(self, ids: NDArray[np.int32], text: str, turn: int) -> Message:
        if self._parse is None:
            return {"role": "assistant", "content": text}
        return self._parse(self._encoder.turn_pieces(ids), self._encoder.own_tokens).message(turn)


def _parser_of(encoder: ChatEncoder, tool_format: str) -> Callable[[Sequence[TurnPiece], frozenset[str]], ParsedTurn]:
    engine, _, name = tool_format.partition(":")
    if name:
        return find_engine(engine).tool_parser(name, encoder.tokenizer, encoder.tools)
    found = find_format(encoder.chat_template) if tool_format == "auto" else cast("ToolFormat", tool_format)
    if found is None:
        fault = f"{encoder.template_source} teaches no format of tool calls that is known"
        raise ModelError(f"{fault}; set environment.tool_format to the one that the model uses")
    return lambda pieces, vocabulary: parse_turn(found, pieces, vocabulary, encoder.tools)


async def start_episodes(
    recipe: Recipe, engine: Sampler, buffer: Buffer, stop: threading.Event, stack: AsyncExitStack
) -> EpisodeSampler | None:
    """Starts the recipe's environment, which ends with `stack`, or finds its services; None if it has none. Then
    `others` has those of evaluation sets by their key.

    Raises ConfigError if a class cannot be used, UnavailableError if no service answers, ModelError if the chat
    template cannot continue a conversation or does not show an environment's tools.
    """
    config = recipe.environment
    if not config.path:
        return None
    pool: EnvironmentSource = EnvironmentServices(recipe, buffer, stop) if config.service else EnvironmentPool(config)
    episodes = await _started(recipe, engine, config, pool, stack)
    for one in recipe.eval_sets:
        if (key := one.environment.key(config)) not in ("", NO_ENVIRONMENT, *episodes.others):
            try:
                pool = EnvironmentPool(other := one.environment.over(config))
                episodes.others[key] = await _started(recipe, engine, other, pool, stack)
                if unsafe := sorted(pool.unsafe_tools):
                    raise ConfigError(f"{unsafe[0]} is unsafe, and evaluations do not save their episodes")
            except ConfigError as error:
                raise ConfigError(f"evaluation set {one.name}: {error}") from None
            episodes.others[key].figures = episodes.figures  # those of the sampler
    return episodes


async def _started(
    recipe: Recipe, engine: Sampler, config: EnvironmentConfig, pool: EnvironmentSource, stack: AsyncExitStack
) -> EpisodeSampler:
    stack.push_async_callback(pool.close)
    await pool.start()
    encoder = await asyncio.to_thread(ChatEncoder, recipe.model.path, recipe.model.chat_template, pool.tools)
    encoder.check_replies(may_rewrite=config.rewritten_history == "fork")
    turns = EpisodeEncoder(encoder, config.tool_format)
    if isinstance(pool, EnvironmentPool) and pool.is_agent:
        return await _start_agents(recipe.run.seed, engine, config, pool, turns, stack)
    return EpisodeSampler(engine, pool, turns, config, recipe.run.seed)


async def _start_agents(
    seed: int,
    engine: Sampler,
    config: EnvironmentConfig,
    pool: EnvironmentPool,
    encoder: EpisodeEncoder,
    stack: AsyncExitStack,
) -> AgentSampler:
    """Serves agents by OpenAI's API until `stack` ends. Raises EnvironmentLackError without the packages for it."""
    with missing_extra_named():
        from tandem.services.rollout.openai_proxy import OpenAIProxy
    agents = AgentSampler(engine, pool, encoder, config, seed)
    agents.address = await stack.enter_async_context(OpenAIProxy(agents.sessions).serving())
    return agents


@dataclass(frozen=True, slots=True)
class _NamedPrompt(Prompt):
    """A prompt of no group. Its name takes the place of the group's id."""

    name: str = ""

    @property
    def group_id(self) -> str:
        return self.name


def requested_prompts(
    item: rollout_pb2.GenerateRequest.Item, token_ids: NDArray[np.int32], sampling: SamplingParameters
) -> list[Prompt]:
    """A prompt for each sample of an item of `Generate` that asks for episodes, so that the environment's seed differs
    from sample to sample. `token_ids` (T,) are the item's. Raises DataError if the item's row cannot be used.
    """
    try:
        values = json.loads(item.episode.row)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the row of an episode is not JSON: {error}") from None
    row = parse_row(0, values) if isinstance(values, dict) else RowFault(0, "malformed", "it is no JSON object")
    if isinstance(row, RowFault):
        raise DataError(f"the row of an episode cannot be used: {row.reason}: {row.detail}")
    return [
        _NamedPrompt(
            epoch=0,
            index=0,
            token_ids=token_ids,
            num_samples=1,
            sampling=sampling,
            data_source=row.data_source,
            ability=row.ability,
            ground_truth=row.ground_truth,
            messages=row.messages,
            extra_info=row.extra_info,
            name=f"{item.episode.name}-{number}",
        )
        for number in range(max(item.num_samples, 1))
    ]
