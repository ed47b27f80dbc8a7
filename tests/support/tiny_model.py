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

__all__ = ["BOS_ID", "CHAT_TEMPLATE", "EOS_ID", "ONE_LAYER", "PAD_ID", "VOCABULARY", "build_tiny_model"]
__all__ += ["character_tokenizer"]

ONE_LAYER = {"vocab_size": len(VOCABULARY), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
ONE_LAYER |= {"num_attention_heads": 1, "num_key_value_heads": 1}
"""Values of a configuration: the smallest model of any architecture."""
