"""Reading the calls in a turn: four formats, tokens against text, and what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.rollout.environments.chat_messages import for_template
from tandem.rollout.environments.tools.parsers import ParsedTurn, ToolFormat, TurnPiece, find_format, parse_turn

TOKENS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "</think>", "<|im_end|>")
SPECIAL = ("<|im_end|>", "<|python_tag|>")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "number"},
                "note": {"type": "string"},
                "both": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                "items": {"type": "array", "items": {"type": "integer"}},
            },
        },
    },
}
CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n1\n2\n</parameter>\n"
    "<parameter=both>True</parameter><parameter=items>[1, 2]</parameter>\n</function>\n</tool_call>"
)
WRITTEN: Mapping[ToolFormat, tuple[str, Sequence[Mapping[str, Any]]]] = {
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "add", "arguments": {"note": "<b>"}}</tool_call>',
        [{"a": 1}, {"note": "<b>"}],
    ),
    "qwen3_coder": (CODER, [{"a": 1, "note": "1\n2", "both": True, "items": [1, 2]}]),
    "llama3_json": (
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"note": "; "}}',
        [{"a": 1}, {"note": "; "}],
    ),
    "pythonic": ("[add(a=1, items=[1, 2]), add(note=')]')]", [{"a": 1, "items": [1, 2]}, {"note": ")]"}]),
}


def as_pieces(text: str, tokens: Sequence[str] = TOKENS) -> list[TurnPiece]:
    """The text as a tokenizer with these tokens encodes it."""
    pieces = [TurnPiece(text)]
    for token in tokens:
        split: list[TurnPiece] = []
        for piece in pieces:
            parts = [piece.text] if piece.is_token else piece.text.split(token)
            for number, part in enumerate(parts):
                split += [TurnPiece(token, True, token in SPECIAL)] if number else []
                split += [piece] if piece.is_token else [TurnPiece(part)] if part else []
        pieces = split
    return pieces


def parsed(tool_format: ToolFormat, text: str, tokens: Sequence[str] = TOKENS) -> ParsedTurn:
    return parse_turn(tool_format, as_pieces(text, tokens), tokens, [ADD])


@pytest.mark.parametrize("tool_format", get_args(ToolFormat))
@pytest.mark.parametrize("tokens", [TOKENS, ("<|im_end|>",)], ids=["tokens", "no tokens"])
def test_every_call_of_a_turn_is_read_in_order(tool_format: ToolFormat, tokens: Sequence[str]) -> None:
    text, arguments = WRITTEN[tool_format]
    turn = parsed(tool_format, text + "<|im_end|>", tokens)
    assert [(call.name, json.loads(call.arguments), call.error) for call in turn.calls] == [
        ("add", given, "") for given in arguments
    ]
    assert turn.content == ""
    message = turn.message(3)
    assert [call["id"] for call in message["tool_calls"]] == [f"call_3_{n}" for n in range(len(arguments))]
    assert message["tool_calls"][0]["type"] == "function" and "error" not in message["tool_calls"][0]


def test_the_text_around_calls_is_the_content_and_thoughts_call_nothing() -> None:
    call = WRITTEN["hermes"][0]
    turn = parsed("hermes", f"<think>{call}</think>I add. {call} Done.<|im_end|>")
    assert turn.content == f"<think>{call}</think>I add. \n Done." and len(turn.calls) == 2
    assert parsed("hermes", f"<think>{call}</think> 7").calls == ()
    assert parsed("llama3_json", "<think>x</think>" + WRITTEN["llama3_json"][0]).calls[1].name == "add"
    assert parsed("hermes", "it is 7<|im_end|>").message(0) == {"role": "assistant", "content": "it is 7"}


@pytest.mark.parametrize(
    ("tool_format", "text", "told"),
    [
        ("hermes", '<tool_call>{"name": "add"', "</tool_call> is missing"),
        ("hermes", "<tool_call>{</tool_call>", "it is not JSON: "),
        ("hermes", "<tool_call>[1]</tool_call>", 'it is no JSON object with a "name"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', '"arguments" is no JSON object'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON number"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "a number is too large"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "it is not JSON: "),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "<function=…> is missing"),
        ("qwen3_coder", "<tool_call><function=add></tool_call>", "</function> is missing"),
        ("qwen3_coder", "<tool_call><function=add>a</function></tool_call>", "<parameter=…> is missing"),
        (
            "qwen3_coder",
            "<tool_call><function=add>" + "<parameter=a>" * 20_000 + "</function></tool_call>",
            "</parameter> is missing",
        ),
        ("llama3_json", '{"name": "add", "parameters": {]}}', "it is not JSON: "),
        ("llama3_json", '{"name": "add", "parameters": 1}', '"parameters" is no JSON object'),
        ("llama3_json", "<|python_tag|>search.call(query='x')", "it is not JSON: "),
        ("pythonic", "[add(1)]", "the arguments of add must have names"),
        ("pythonic", "[add(a=b)]", "an argument of add is no value that JSON has"),
        ("pythonic", "[add(a=1), 2]", "an item of the list is no call of a tool"),
        ("pythonic", "[add(a=]", "it is no Python list of calls: "),
        ("pythonic", "[add(a=" + "(" * 5000 + ")]", "it is no Python list of calls: "),
        ("pythonic", "[add(a=" + "1+" * 50_000 + "1)]", ""),
    ],
)
def test_what_cannot_be_read_as_a_call_says_why(tool_format: ToolFormat, text: str, told: str) -> None:
    turn = parsed(tool_format, text)
    wrong = [call for call in turn.calls if call.error]
    assert len(wrong) == 1 and told in wrong[0].error and wrong[0].name == "" and len(wrong[0].arguments) <= 200
    assert turn.message(0)["tool_calls"][-1]["error"] == wrong[0].error


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("llama3_json", f"I would write {WRITTEN['llama3_json'][0]}"),
        ("llama3_json", f"{WRITTEN['llama3_json'][0]} is what I write."),
        ("llama3_json", '{"answer": 7}'),
        ("pythonic", f"I would write {WRITTEN['pythonic'][0]}"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[f(x)](https://example.org) and [1]"),
        ("hermes", "add(a=1)"),
    ],
)
def test_a_turn_that_only_mentions_a_call_is_an_answer(tool_format: ToolFormat, text: str) -> None:
    turn = parsed(tool_format, text)
    assert [call.name for call in turn.calls if not call.error] == []
    assert turn.content == text or turn.calls


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*TOKENS, *(text for text, _ in WRITTEN.values()), "x", "\n", '{"name": "add"}'])))
@example([WRITTEN["hermes"][0]])
def test_quoted_markers_call_nothing_where_the_model_has_tokens_for_them(parts: list[str]) -> None:
    """The whole turn is spelled by ordinary tokens, so that no piece of it is a token."""
    text = "".join(parts)
    for tool_format in ("hermes", "qwen3_coder"):
        turn = parse_turn(tool_format, [TurnPiece(text)], TOKENS, [ADD])
        assert turn == ParsedTurn(text), "without tokens there is no call"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([*TOKENS, "<function=add>", '{"name": "', "[add(a=1", ")]", "}"]), st.text()))
)
def test_no_turn_makes_a_parser_fail(parts: list[str]) -> None:
    for tool_format in get_args(ToolFormat):
        turn = parsed(tool_format, "".join(parts))
        for call in turn.calls:
            assert call.error or isinstance(json.loads(call.arguments), dict)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.dictionaries(st.text(max_size=9), st.integers() | st.text(max_size=20), max_size=3), min_size=1, max_size=4
    ),
    st.booleans(),
)
def test_what_is_written_as_calls_is_read_back(arguments: list[dict[str, Any]], has_tokens: bool) -> None:
    texts = [json.dumps({"name": "add", "arguments": one}) for one in arguments]
    clean = [text for text in texts if not any(token in text for token in TOKENS)]
    written = "".join(f"<tool_call>{text}</tool_call>" for text in clean)
    turn = parsed("hermes", written, TOKENS if has_tokens else ())
    assert [json.loads(call.arguments) for call in turn.calls] == [json.loads(text)["arguments"] for text in clean]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call>\n<function=example_function_name>", "qwen3_coder"),
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ('{"name": function name, "parameters": dictionary} <|start_header_id|>ipython', "llama3_json"),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]", "pythonic"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", None),
    ],
)
def test_the_template_says_which_format_its_model_writes(template: str, expected: ToolFormat | None) -> None:
    assert find_format(template) == expected


ODD_CALLS = [
    None,
    "text",
    [{"function": {"name": "add", "arguments": {"a": 1}}}],
    [{"function": {"name": "add"}}, {"type": "function"}, None],
]


@pytest.mark.parametrize("calls", ODD_CALLS, ids=str)
def test_calls_in_messages_of_others_reach_the_template_as_they_are(calls: object) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert for_template([message]) == [message]


def test_arguments_reach_the_template_as_values() -> None:
    given = {"function": {"name": "add", "arguments": '{"a": 1}'}, "id": "1"}
    (message,) = for_template([{"role": "assistant", "content": "", "tool_calls": [given, None]}])
    assert message["tool_calls"] == [{"function": {"name": "add", "arguments": {"a": 1}}, "id": "1"}, None]
