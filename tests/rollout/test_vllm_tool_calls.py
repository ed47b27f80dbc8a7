"""Calls of tools that vLLM's own parsers read, with tokenizers that have their markers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from vllm.tool_parsers import ToolParserManager

from tandem.protos.contracts import Message
from tandem.protos.errors import EnvironmentLackError, ModelError
from tandem.rollout.engine import find_engine
from tandem.rollout.vllm.engine import VllmEngine
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tests.support.agents import TOOL
from tests.support.tiny_model import TOOL_TEMPLATE, build_tiny_model

THOUGHT, END = "</think>", "<|im_end|>"
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")
KIMI_WORDS = (*KIMI, "<|tool_call_argument_begin|>", THOUGHT)
GLM_WORDS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", THOUGHT)
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
ONE, TWO = '{"a": 1}', '{"a": 2}'


def kimi(*arguments: str) -> str:
    calls = (f"{KIMI[2]}functions.add:0<|tool_call_argument_begin|>{one}{KIMI[3]}" for one in arguments)
    return f"{KIMI[0]}{''.join(calls)}{KIMI[1]}"


def glm(number: int) -> str:
    return f"<tool_call>add<arg_key>a</arg_key><arg_value>{number}</arg_value></tool_call>"


def deepseek(*arguments: str) -> str:
    calls = (f"{DEEPSEEK[2]}add{DEEPSEEK[4]}{one}{DEEPSEEK[3]}" for one in arguments)
    return f"{DEEPSEEK[0]}{''.join(calls)}{DEEPSEEK[1]}"


def decoded(folder: Path, parser: str, words: Sequence[str], text: str) -> Message:
    model = build_tiny_model(folder / "model", chat_template=TOOL_TEMPLATE, words=words)
    encoder = ChatEncoder(str(model)).with_tools([TOOL])
    ids = encoder._ids(text)
    return EpisodeEncoder(encoder, f"vllm:{parser}").decode_turn(ids, text, 3)


@pytest.mark.parametrize(
    ("parser", "words", "text"),
    [
        ("kimi_k2", KIMI_WORDS, kimi(ONE, TWO)),
        ("glm47", GLM_WORDS, glm(1) + glm(2)),
        ("llama4_pythonic", (THOUGHT,), "[add(a=1), add(a=2)]"),
        ("deepseek_v31", (*DEEPSEEK, THOUGHT), deepseek(ONE, TWO)),
    ],
)
def test_every_call_is_read_in_order_but_none_before_the_end_of_a_thought(
    tmp_path: Path, parser: str, words: Sequence[str], text: str
) -> None:
    message = decoded(tmp_path / "calls", parser, words, f"I may call {text}{THOUGHT}{text}{END}")
    calls = [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]]
    assert [(name, tool, json.loads(arguments)) for name, tool, arguments in calls] == [
        ("call_3_0", "add", {"a": 1}),
        ("call_3_1", "add", {"a": 2}),
    ]
    said = decoded(tmp_path / "answer", parser, words, f"{text}{THOUGHT}No.{END}")
    assert "tool_calls" not in said and said["content"].endswith("No.")


def test_arguments_that_are_no_json_are_a_call_that_cannot_be_read(tmp_path: Path) -> None:
    message = decoded(tmp_path, "kimi_k2", KIMI_WORDS, f"{kimi('{a: 1}')}{END}")
    (call,) = message["tool_calls"]
    assert (call["error"], call["function"]["arguments"]) == ("its arguments are no JSON object", "{a: 1}")


def test_a_turn_that_a_parser_cannot_read_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise IndexError

    monkeypatch.setattr(ToolParserManager.get_tool_parser("kimi_k2"), "extract_tool_calls", fail)
    message = decoded(tmp_path, "kimi_k2", KIMI_WORDS, f"So.{END}")
    assert message == {"role": "assistant", "content": "So."}


def test_a_parser_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = r"^environment\.tool_format "
    with pytest.raises(ModelError, match=key + '"vllm:kimi": vLLM has no such parser; it has .*kimi_k2.*$'):
        decoded(tmp_path / "unknown", "kimi", (), "")
    with pytest.raises(ModelError, match=key + '"vllm:deepseek_v3" does not go with the model: .+$'):
        decoded(tmp_path / "other", "deepseek_v3", (), "")
    with pytest.raises(ModelError, match="transformers has no parsers of tool calls"):
        find_engine("transformers").tool_parser("kimi_k2", None, [TOOL])
    monkeypatch.setattr(VllmEngine, "installed", False)
    with pytest.raises(EnvironmentLackError, match="vllm is not installed; install it: "):
        find_engine("vllm").tool_parser("kimi_k2", None, [TOOL])
