"""Builds a tiny, randomly initialised Qwen2 model with a character tokenizer for the demo and the tests."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = ("<pad>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID = range(len(SPECIAL_TOKENS))
CHARACTERS = (*(c for c in string.printable if c.isprintable()), "\n")
VOCABULARY = SPECIAL_TOKENS + CHARACTERS  # a token's id is its index
HEAD_SIZE = 32  # the smallest that vLLM's CPU attention supports
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_model(
    folder: Path,
    *,
    tied: bool = True,
    hidden: int = 32,
    layers: int = 2,
    seed: int = 0,
    initializer_range: float = 0.1,
    chat_template: str = CHAT_TEMPLATE,
    words: Sequence[str] = (),
    ends: bool = True,
) -> Path:
    """Writes model, configuration and tokenizer to `folder` (a Hugging Face folder in float32) and returns it.

    There is one attention head for each 32 of `hidden`. `seed` determines the weights. Each of `words` is one token.
    Without `ends`, the end token is outside the vocabulary, so every answer has the maximum length.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from tandem.trainer.checkpoints.export import save_model

    disable_progress_bar()
    assert hidden % HEAD_SIZE == 0, "vLLM on CPUs wants heads of size 32"
    vocabulary_size = len(VOCABULARY) + len(words)
    end = EOS_ID if ends else vocabulary_size
    config = Qwen2Config(
        vocab_size=vocabulary_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
        bos_token_id=BOS_ID,
        eos_token_id=end,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=end, pad_token_id=PAD_ID)
    save_model(model, folder)
    character_tokenizer(chat_template, words, ends).save_pretrained(folder)
    return Path(folder)


def character_tokenizer(
    chat_template: str = CHAT_TEMPLATE, words: Sequence[str] = (), ends: bool = True
) -> PreTrainedTokenizerBase:
    """A tokenizer with one token for each printable ASCII character, newline and word. Other characters are dropped.

    transformers loads the tokenizer of every `qwen2` model as a byte-level BPE `Qwen2Tokenizer`, even if its file names
    another class. So this one is a `Qwen2Tokenizer` without merges, whose alphabet writes space and newline as Ġ and Ċ.
    """
    from transformers import Qwen2Tokenizer

    byte_level = {" ": "Ġ", "\n": "Ċ"}
    tokenizer = Qwen2Tokenizer(
        vocab={byte_level.get(token, token): number for number, token in enumerate(VOCABULARY)},
        merges=[],
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<pad>",
    )
    tokenizer.add_tokens(list(words))
    if not ends:
        tokenizer.add_special_tokens({"eos_token": "<never>"})
    tokenizer.chat_template = chat_template
    return tokenizer
