"""Chat templates in the forms of several model families, and a byte-level BPE tokenizer that knows their tokens.

Text that is decoded and encoded again often has other tokens: the tokenizer has merges, and a policy may sample any
sequence of its tokens, also one that no text is encoded to.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tandem.services.data.chat import ChatEncoder
from tests.support.tiny_model import TOOL_TEMPLATE

THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}

_QWEN_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>\n'
    "{% elif messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
)
_QWEN_OTHERS = (
    "{% if m.role == 'user' or m.role == 'system' and not (tools and loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
)
_QWEN_CALLS = (
    "{% for call in m.tool_calls %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>"
    "{% endfor %}<|im_end|>\n"
)
_QWEN_END = "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@dataclass(frozen=True)
class ChatTemplate:
    text: str
    end: str = "<|im_end|>"
    """The token that ends an answer."""
    with_tools: bool = False
    """It shows tools, and writes parsed calls anew."""
    alternates: bool = False
    """It takes messages of users and assistants in turns, and no others."""


TEMPLATES = {
    "Qwen2.5": ChatTemplate(
        _QWEN_TOOLS
        + "{% for m in messages %}"
        + _QWEN_OTHERS
        + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
        + _QWEN_CALLS
        + _QWEN_END,
        with_tools=True,
    ),
    "Qwen3": ChatTemplate(
        _QWEN_TOOLS + "{% set found = namespace(query=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set found.query = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}" + _QWEN_OTHERS + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
        "{% set said = (m.content or '').split('</think>') %}"
        "{% if said | length > 1 and loop.index0 > found.query %}"
        "<think>\n{{ said[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}"
        "{{ said[-1].lstrip('\n') }}" + _QWEN_CALLS + _QWEN_END,
        with_tools=True,
    ),
    "Llama 3": ChatTemplate(
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>"
        "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        end="<|eot_id|>",
    ),
    "Mistral": ChatTemplate(
        "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
        "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}",
        end="</s>",
    ),
    "Gemma": ChatTemplate(
        "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        end="<end_of_turn>",
    ),
    "ChatML": ChatTemplate(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "DeepSeek-R1": ChatTemplate(
        "<|begin_of_text|>{% for m in messages %}{% if m.role == 'assistant' %}"
        "<|Assistant|>{{ m.content.split('</think>')[-1] }}</s>{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}",
        end="</s>",
    ),
    "the demo's": ChatTemplate(TOOL_TEMPLATE),
}
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_SPECIAL += ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<bos>", "<start_of_turn>"]
_SPECIAL += ["<end_of_turn>", "<|User|>", "<|Assistant|>"]
_SPECIAL_FORM = re.compile(r"<[|｜][^<>{}'\"\s]+[|｜]>|<\w+_of_turn>")
_FIRST = "<|begin_of_text|>"
_WORDS = (
    "the answer is higher or lower than what you guess; so add the numbers and name the arguments of the tool, "
    'then wait for its result. {"name": "add", "arguments": {"a": 1, "b": 23}} naïve café über größer süß 数字 🙂 '
    "user assistant system think therefore another thing that they thought through thoroughly\n\n"
)


@cache
def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Every byte, and merges: token ids by text, and the pairs that are merged."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([_WORDS], trainer)
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def bpe_tokenizer(template: ChatTemplate) -> Any:
    """A tokenizer of Qwen's kind, with the special tokens that the template writes."""
    from transformers import Qwen2Tokenizer

    vocabulary, merges = _vocabulary()
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, bos_token=_FIRST, eos_token=template.end)
    found = _SPECIAL_FORM.findall(template.text)
    tokenizer.add_special_tokens({"additional_special_tokens": [*dict.fromkeys([*_SPECIAL, *found])]})
    tokenizer.add_tokens([THINK, END_THINK, CALL, END_CALL])
    return tokenizer


def template_encoder(folder: Path, template: ChatTemplate) -> ChatEncoder:
    """The encoder of a model with this template, whose files are written to the folder."""
    bpe_tokenizer(template).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "template.jinja").write_text(template.text)
    return ChatEncoder(str(folder), str(folder / "template.jinja"), [SCHEMA] if template.with_tools else ())
