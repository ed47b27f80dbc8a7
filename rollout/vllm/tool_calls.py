"""vLLM's parsers of tool calls, for models that write calls in a format of their own."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import cast

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers import ToolParserManager

from tandem.protos.contracts import JsonObject
from tandem.protos.errors import ModelError
from tandem.rollout.environments.tools.parsers import ParsedTurn, ToolCall, TurnPiece, text_of, without_thoughts

log = logging.getLogger(__name__)


class VllmToolParser:
    """The parser that vLLM calls `name`, for turns of a policy that is shown these tools.

    It reads text, so quoted markers begin calls, too, and what it cannot read is text. Raises ModelError if vLLM has no
    such parser, or it does not go with the tokenizer.
    """

    def __init__(self, name: str, tokenizer: object, schemas: Sequence[JsonObject]) -> None:
        key = f'environment.tool_format "vllm:{name}"'
        try:
            chosen = ToolParserManager.get_tool_parser(name)
        except KeyError:
            known = ", ".join(sorted({*ToolParserManager.lazy_parsers, *ToolParserManager.tool_parsers}))
            raise ModelError(f"{key}: vLLM has no such parser; it has {known}") from None
        tools = [dict(schema) for schema in schemas]
        self._request = ChatCompletionRequest(messages=[], model="policy", tools=tools)
        try:
            self._parser = chosen(cast("TokenizerLike", tokenizer), self._request.tools)
        except Exception as error:  # of any parser, e.g. for a tokenizer without its markers
            told = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"{key} does not go with the model: {told}") from None

    def parse(self, pieces: Sequence[TurnPiece], vocabulary: frozenset[str]) -> ParsedTurn:
        """As `parse_turn`."""
        thoughts, rest = without_thoughts(pieces, vocabulary)
        if rest and rest[-1].is_special:  # the end of the message
            rest = rest[:-1]
        try:
            found = self._parser.extract_tool_calls("".join(piece.text for piece in rest), self._request)
        except Exception as error:  # of any parser: a policy may write anything
            log.warning("a turn that vLLM's parser cannot read is taken as text: %s", error)
            return ParsedTurn(text_of(pieces))
        calls = tuple(_checked(call.function.name, call.function.arguments) for call in found.tool_calls)
        if not found.tools_called or not calls:
            return ParsedTurn(text_of(pieces))
        return ParsedTurn((text_of(thoughts) + (found.content or "")).strip(), calls)


def _checked(name: str, arguments: str) -> ToolCall:
    """A call, or what could not be read as one: some parsers pass on arguments as they were written."""
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        return ToolCall("", _valid(arguments), "its arguments are no JSON object")
    return ToolCall(_valid(name), _valid(arguments))


def _valid(text: str) -> str:
    """JSON may spell lone surrogates."""
    return text.encode("utf-8", "replace").decode()
