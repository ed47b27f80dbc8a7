"""Chat templates in the forms of several model families, and a byte-level BPE tokenizer that knows their tokens.

Text that is decoded and encoded again often has other tokens: the tokenizer has merges, and a policy may sample any
sequence of its tokens, also one that no text is encoded to.
"""

from __future__ import annotations

import json
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

TEMPLATES = {
    "Qwen2.5": _QWEN_TOOLS
    + "{% for m in messages %}"
    + _QWEN_OTHERS
    + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    + _QWEN_CALLS
    + _QWEN_END,
    "Qwen3": _QWEN_TOOLS + "{% set found = namespace(query=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set found.query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}" + _QWEN_OTHERS + "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set said = (m.content or '').split('</think>') %}"
    "{% if said | length > 1 and loop.index0 > found.query %}"
    "<think>\n{{ said[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ said[-1].lstrip('\n') }}" + _QWEN_CALLS + _QWEN_END,
    "Llama 3": "<|begin_of_text|>{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "Mistral": "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}",
    "Gemma": "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "ChatML": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "DeepSeek-R1": "<|begin_of_text|>{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}</s>{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}",
    "the demo's": TOOL_TEMPLATE,
}
END_TOKENS = {"Llama 3": "<|eot_id|>", "Mistral": "</s>", "Gemma": "<end_of_turn>", "DeepSeek-R1": "</s>"}
"""Of the others it is `<|im_end|>`."""
WITH_TOOLS = ("Qwen2.5", "Qwen3")
"""Whose calls of tools are parsed, and written anew by the template."""

_SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_SPECIAL += ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<bos>", "<start_of_turn>"]
_SPECIAL += ["<end_of_turn>", "<|User|>", "<|Assistant|>"]
_WORDS = (
    "the answer is higher or lower than what you guess; so add the numbers and name the arguments of the tool, "
    'then wait for its result. {"name": "add", "arguments": {"a": 1, "b": 23}} naïve café über größer süß 数字 🙂 '
    "user assistant system think therefore another thing that they thought through thoroughly\n\n"
)


@cache
def bpe_tokenizer() -> Any:
    """A tokenizer of Qwen's kind, with every byte, merges, and the templates' tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([_WORDS], trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    tokenizer.add_tokens([THINK, END_THINK, CALL, END_CALL])
    return tokenizer


def template_encoder(folder: Path, name: str) -> ChatEncoder:
    """The encoder of one of `TEMPLATES`, whose files are written to the folder."""
    bpe_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "template.jinja").write_text(TEMPLATES[name])
    return ChatEncoder(str(folder), str(folder / "template.jinja"), [SCHEMA] if name in WITH_TOOLS else ())
