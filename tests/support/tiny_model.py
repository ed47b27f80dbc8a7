"""The model that the tests train and sample, made by the demo's builder."""

from tandem.services.data.tiny_model import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    PAD_ID,
    VOCABULARY,
    build_tiny_model,
    character_tokenizer,
)

__all__ = ["BOS_ID", "CHAT_TEMPLATE", "EOS_ID", "ONE_LAYER", "PAD_ID", "TOOL_TEMPLATE", "VOCABULARY"]
__all__ += ["build_tiny_model", "character_tokenizer"]

TOOL_TEMPLATE = (
    '{% if tools %}<|im_start|>system\n{{ tools | tojson }}\n<tool_call>{"name": ..., "arguments": ...}</tool_call>'
    "<|im_end|>\n{% endif %}" + CHAT_TEMPLATE
)
"""Shows tools, and teaches the format hermes."""

ONE_LAYER = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
ONE_LAYER |= {"num_attention_heads": 1, "num_key_value_heads": 1}
"""Values of a configuration: the smallest model of any architecture."""
