"""Episodes of the rollout service: the recipe's environment, and the model's chat template between its turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np
from numpy.typing import NDArray

from tandem.protos.contracts import Message
from tandem.protos.errors import EpisodeError
from tandem.rollout.environments.episode import EpisodeSampler
from tandem.rollout.environments.process import EnvironmentPool
from tandem.rollout.sampler import Sampler
from tandem.services.config import Recipe
from tandem.services.data.chat import ChatEncoder, RefusedPromptError


class EpisodeEncoder:
    """The model's chat template. Messages that it refuses are a fault of the environment that sent them."""

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder

    def encode(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        try:
            return self._encoder.encode(messages)
        except RefusedPromptError as error:
            raise EpisodeError(f"the chat template refuses the messages of reset: {error}") from None

    def encode_reply(self, messages: Sequence[Message], last_token: int) -> NDArray[np.int32]:
        try:
            return self._encoder.encode_reply(messages, last_token)
        except RefusedPromptError as error:
            raise EpisodeError(f"the chat template refuses the messages of step: {error}") from None


async def start_episodes(recipe: Recipe, engine: Sampler, stack: AsyncExitStack) -> EpisodeSampler | None:
    """Starts the recipe's environment, which ends with `stack`; None if it has none.

    Raises ConfigError if its class cannot be used, ModelError if the chat template cannot continue a conversation.
    """
    config = recipe.environment
    if not config.path:
        return None
    encoder = await asyncio.to_thread(ChatEncoder, recipe.model.path, recipe.model.chat_template)
    encoder.check_replies()
    pool = EnvironmentPool(config)
    stack.push_async_callback(pool.close)
    await pool.start()
    return EpisodeSampler(engine, pool, EpisodeEncoder(encoder), config, recipe.run.seed)
