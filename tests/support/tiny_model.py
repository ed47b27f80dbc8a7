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

__all__ = ["BOS_ID", "CHAT_TEMPLATE", "EOS_ID", "PAD_ID", "VOCABULARY", "build_tiny_model", "character_tokenizer"]
