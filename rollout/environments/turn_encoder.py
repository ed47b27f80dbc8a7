"""What episodes need of the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.protos.contracts import Message


class TurnEncoder(Protocol):
    """Turns messages into token ids by the model's chat template, and turns of the policy into messages.

    Raises EpisodeError if the template refuses the messages.
    """

    @property
    def shows_tools(self) -> bool:
        """Whether the template shows tools, so that the first prompt is not that of the data set alone."""
        ...

    def encode(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """Token ids (T,) of a conversation up to the start of the policy's first turn."""
        ...

    def encode_reply(self, messages: Sequence[Message], last_token: int) -> NDArray[np.int32]:
        """Token ids (T,) from the end of the policy's turn, whose last token is given, to the start of its next one."""
        ...

    def encode_increment(self, messages: Sequence[Message], ids: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """What the template puts after the text of token ids (T,) in its rendering of the whole conversation, as token
        ids; None if the rendering does not begin with that text, white space aside.
        """
        ...

    def decode_turn(self, ids: NDArray[np.int32], text: str, turn: int) -> Message:
        """The policy's message of a complete turn with token ids (T,), with its tool calls as `tool_calls`."""
        ...
