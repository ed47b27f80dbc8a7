"""Reads the tool calls in a turn of the policy, in the format that its chat template teaches. Pure text work.

A turn comes in pieces, because the tokens decide what is a call: where the vocabulary has a token for a marker such as
`<tool_call>`, the same characters spelled by other tokens are text.

The formats have the names of vLLM's parsers. A call that cannot be read is kept with the reason, at its place.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from tandem.protos.contracts import JsonObject, Message

ToolFormat = Literal["hermes", "qwen3_coder", "llama3_json", "pythonic"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_END_OF_THOUGHT = "</think>"
_MAX_SHOWN = 200
_IS_LLAMA_CALL = re.compile(r'\{\s*"name"\s*:')
_SEPARATOR = re.compile(r"\s*;?\s*")
_IS_PYTHONIC_CALL = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


class TurnPiece(NamedTuple):
    """A part of a turn: one token that has a text of its own in the vocabulary, or a text of ordinary tokens."""

    text: str
    is_token: bool = False
    is_special: bool = False
    """A token that is no part of the text, such as the end of a message."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, or with an `error` what could not be read as one: its text is in `arguments` then."""

    name: str
    arguments: str
    """JSON text of an object."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn: its text without the calls, and its calls in order."""

    content: str
    calls: tuple[ToolCall, ...] = ()

    def message(self, turn: int) -> Message:
        """The turn as a chat message in OpenAI's form. A call that could not be read has an `error` and no name."""
        calls = [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
                **({"error": call.error} if call.error else {}),
            }
            for number, call in enumerate(self.calls)
        ]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}


class _UnreadableError(Exception):
    """A text is no call; the message says why."""


def parse_turn(
    tool_format: ToolFormat, pieces: Sequence[TurnPiece], vocabulary: Collection[str], schemas: Sequence[JsonObject]
) -> ParsedTurn:
    """The calls in a turn. What precedes the last `</think>` holds none.

    `vocabulary` has the texts of the tokens that `TurnPiece.is_token` may mark; `schemas` are the tools' in OpenAI's
    form, by which `qwen3_coder` converts its untyped values.
    """
    marked = list(_cut_at_markers(pieces, [_OPEN, _CLOSE, _PYTHON_TAG, _END_OF_THOUGHT], vocabulary))
    thoughts, rest = without_thoughts(marked, vocabulary)
    parsed = _PARSERS[tool_format](rest, schemas)
    return ParsedTurn((text_of(thoughts) + parsed.content).strip() if parsed.calls else text_of(marked), parsed.calls)


def without_thoughts(
    pieces: Sequence[TurnPiece], vocabulary: Collection[str]
) -> tuple[Sequence[TurnPiece], Sequence[TurnPiece]]:
    """The pieces up to the last `</think>`, and those after it."""
    marked = list(_cut_at_markers(pieces, [_END_OF_THOUGHT], vocabulary))
    ends = [place for place, piece in enumerate(marked) if piece.is_token and piece.text == _END_OF_THOUGHT]
    begin = ends[-1] + 1 if ends else 0
    return marked[:begin], marked[begin:]


def text_of(pieces: Sequence[TurnPiece]) -> str:
    """The text of a part of a turn."""
    return "".join(piece.text for piece in pieces if not piece.is_special)


def find_format(chat_template: str) -> ToolFormat | None:
    """The format that a chat template teaches, or None if it teaches none of those known here."""
    if "<function=" in chat_template:
        return "qwen3_coder"
    if _OPEN in chat_template:
        return "hermes"
    if '"parameters"' in chat_template and ("ipython" in chat_template or _PYTHON_TAG in chat_template):
        return "llama3_json"
    if re.search(r"\[\w+\(\w+=", chat_template):
        return "pythonic"
    return None


def _cut_at_markers(
    pieces: Sequence[TurnPiece], markers: Sequence[str], vocabulary: Collection[str]
) -> Iterator[TurnPiece]:
    """Texts are cut at the markers that have no token."""
    spelled = [re.escape(marker) for marker in markers if marker not in vocabulary]
    pattern = re.compile(f"({'|'.join(spelled)})") if spelled else None
    for piece in pieces:
        if piece.is_token or pattern is None:
            yield piece
            continue
        for number, part in enumerate(pattern.split(piece.text)):
            if part:
                yield TurnPiece(part, is_token=number % 2 == 1)


def _between_markers(read: Callable[[str, Sequence[JsonObject]], ToolCall]) -> _Parser:
    """A parser of calls between `<tool_call>` and `</tool_call>`, which are markers only at their right places."""

    def parse(pieces: Sequence[TurnPiece], schemas: Sequence[JsonObject]) -> ParsedTurn:
        outside: list[TurnPiece] = []
        calls: list[ToolCall] = []
        inside: list[TurnPiece] | None = None
        for piece in pieces:
            if piece.is_token and piece.text == _OPEN:
                if inside is not None:
                    calls.append(_unreadable(text_of(inside), f"{_CLOSE} is missing"))
                inside = []
            elif inside is None:
                outside.append(piece)
            elif piece.is_token and piece.text == _CLOSE:
                calls.append(_read_or_unreadable(read, text_of(inside), schemas))
                inside = None
            else:
                inside.append(piece)
        if inside is not None:
            calls.append(_unreadable(text_of(inside), f"{_CLOSE} is missing"))
        return ParsedTurn(text_of(outside), tuple(calls))

    return parse


def _read_or_unreadable(
    read: Callable[[str, Sequence[JsonObject]], ToolCall], text: str, schemas: Sequence[JsonObject]
) -> ToolCall:
    try:
        return read(text, schemas)
    except _UnreadableError as error:
        return _unreadable(text, str(error))
    except (ValueError, RecursionError):
        return _unreadable(text, "a number is too large, or it is nested too deeply")


def _unreadable(text: str, error: str) -> ToolCall:
    return ToolCall("", text[:_MAX_SHOWN], error)


def _read_hermes(text: str, schemas: Sequence[JsonObject]) -> ToolCall:
    return _call_of(_json_value(text), "arguments")


def _call_of(value: object, *keys: str) -> ToolCall:
    """The call in `{"name": …, "arguments": {…}}`, where the arguments are under one of `keys`.

    Raises ValueError for a number without an equal in JSON, such as 1e999, and RecursionError.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _UnreadableError('it is no JSON object with a "name"')
    given: object = next((value[key] for key in keys if key in value), {})
    if not isinstance(given, dict):
        raise _UnreadableError(f'"{keys[0]}" is no JSON object')
    name = value["name"].encode("utf-8", "replace").decode()  # JSON may spell lone surrogates
    return ToolCall(name, json.dumps(given, allow_nan=False))


def _json_value(text: str) -> object:
    """Raises _UnreadableError also for what only Python's JSON has: NaN and infinities."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _UnreadableError(f"it is not JSON: {error}" if str(error) else "it is not JSON") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _read_qwen3_coder(text: str, schemas: Sequence[JsonObject]) -> ToolCall:
    """`<function=NAME><parameter=KEY>VALUE</parameter>…</function>`, with newlines between them."""
    name, body = _tagged(text.strip(), "function")
    body, closed, rest = body.rpartition("</function>")
    if not closed or rest.strip():
        raise _UnreadableError("</function> is missing at its end")
    parameters = _parameters(schemas, name)
    arguments: dict[str, object] = {}
    while body := body.strip():
        key, body = _tagged(body, "parameter")
        value, closed, body = body.partition("</parameter>")
        if not closed:
            raise _UnreadableError("</parameter> is missing")
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = _converted(value, parameters.get(key, {}))
    return ToolCall(name, json.dumps(arguments, allow_nan=False))


def _tagged(text: str, tag: str) -> tuple[str, str]:
    """NAME and what follows, of `<tag=NAME>…`."""
    name, closed, rest = text.removeprefix(f"<{tag}=").partition(">")
    if not text.startswith(f"<{tag}=") or not closed or not name.strip():
        raise _UnreadableError(f"<{tag}=…> is missing")
    return name.strip(), rest


def _parameters(schemas: Sequence[JsonObject], name: str) -> Mapping[str, JsonObject]:
    for schema in schemas:
        if schema["function"]["name"] == name:
            return dict(schema["function"].get("parameters", {}).get("properties", {}))
    return {}


def _converted(text: str, schema: JsonObject) -> object:
    """A value of the type in the schema, or the text itself, which is then refused where another type is wanted."""
    alternatives = schema.get("anyOf", [schema])
    types = {one for each in alternatives for one in _types(each)}
    plain = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    if "null" in types and plain.strip() == "null":
        return None
    if not types or "string" in types:
        return text
    try:
        return _json_value(plain)
    except _UnreadableError:
        return text


def _types(schema: JsonObject) -> Sequence[str]:
    declared = schema.get("type", "object" if "$ref" in schema else ())
    return (declared,) if isinstance(declared, str) else declared


def _parse_llama3_json(pieces: Sequence[TurnPiece], schemas: Sequence[JsonObject]) -> ParsedTurn:
    """A turn that is nothing but `{"name": …, "parameters": {…}}`, several of them separated by semicolons."""
    is_tagged = any(piece.is_token and piece.text == _PYTHON_TAG for piece in pieces)
    text = text_of([piece for piece in pieces if not (piece.is_token and piece.text == _PYTHON_TAG)]).strip()
    if not is_tagged and not (_IS_LLAMA_CALL.match(text) and text.endswith("}")):
        return ParsedTurn(text)
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    calls: list[ToolCall] = []
    place = 0
    try:
        while not calls or place < len(text):
            value, place = decoder.raw_decode(text, place)
            calls.append(_call_of(value, "parameters", "arguments"))
            following = _SEPARATOR.match(text, place)
            assert following is not None, "the pattern matches the empty text"
            place = following.end()
    except (ValueError, RecursionError) as error:
        calls = [_unreadable(text, f"it is not JSON: {error}")]
    except _UnreadableError as error:
        calls = [_unreadable(text, str(error))]
    return ParsedTurn("", tuple(calls))


def _parse_pythonic(pieces: Sequence[TurnPiece], schemas: Sequence[JsonObject]) -> ParsedTurn:
    """A turn that is nothing but a Python list of calls: `[add(a=1, b=2), now()]`."""
    text = text_of(pieces).strip()
    if not (_IS_PYTHONIC_CALL.match(text) and text.endswith("]")):
        return ParsedTurn(text)
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return ParsedTurn("", (_unreadable(text, f"it is no Python list of calls: {error}"),))
    if not isinstance(tree, ast.List):
        return ParsedTurn(text)
    return ParsedTurn("", tuple(_pythonic_call(node, text) for node in tree.elts))


def _pythonic_call(node: ast.expr, text: str) -> ToolCall:
    if not isinstance(node, ast.Call) or not (name := _dotted_name(node.func)):
        return _unreadable(text, "an item of the list is no call of a tool")
    try:
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        as_text = json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return _unreadable(text, f"an argument of {name} is no value that JSON has")
    if node.args or None in arguments:
        return _unreadable(text, f"the arguments of {name} must have names")
    return ToolCall(name, as_text)


def _dotted_name(node: ast.expr) -> str:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *names]) if isinstance(node, ast.Name) else ""


_Parser = Callable[[Sequence[TurnPiece], Sequence[JsonObject]], ParsedTurn]
_PARSERS: Mapping[ToolFormat, _Parser] = {
    "hermes": _between_markers(_read_hermes),
    "qwen3_coder": _between_markers(_read_qwen3_coder),
    "llama3_json": _parse_llama3_json,
    "pythonic": _parse_pythonic,
}
