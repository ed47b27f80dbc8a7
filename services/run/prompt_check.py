"""Whether a run would find any prompt that it can use. Loads the tokenizer only if that is in doubt."""

from __future__ import annotations

from itertools import islice

from tandem.protos.errors import DataError
from tandem.services.config import Recipe
from tandem.services.data.chat import ChatEncoder, RefusedPromptError
from tandem.services.data.dataset import Row
from tandem.services.data.mixture import Mixture

CHECKED_ROWS = 1000
_TEMPLATE_TOKENS = 512
"""More than a chat template adds to the messages. A token has at least one byte, so a prompt with so few bytes fits."""


def check_prompts(recipe: Recipe) -> None:
    """At least one of the first rows makes a prompt of at most `data.max_prompt_tokens`.

    If there are more rows than it looks at, the feed decides.

    Raises:
        DataError: all rows of the training files are unusable.
        ModelError: the tokenizer cannot be loaded.
    """
    limit = recipe.data.max_prompt_tokens
    dataset = Mixture(recipe.data.train_files)
    usable = (row for row in (dataset.row(index, 0) for index in range(len(dataset))) if isinstance(row, Row))
    rows = list(islice(usable, CHECKED_ROWS))
    if any(_num_bytes(row) + _TEMPLATE_TOKENS <= limit for row in rows):
        return
    encoder = ChatEncoder(recipe.model.path, recipe.model.chat_template) if rows else None
    shortest: int | None = None
    for row in rows:
        assert encoder is not None
        try:
            length = len(encoder.encode(row.messages))
        except RefusedPromptError:
            continue
        if 0 < length <= limit:
            return
        shortest = min(length, shortest or length)
    if len(rows) == CHECKED_ROWS:
        return
    why = (
        f"the shortest prompt has {shortest} tokens and data.max_prompt_tokens is {limit}" if shortest else "no prompt"
    )
    raise DataError(f"dataset {dataset.name} has no usable row ({why}); see `tandem data check {dataset.name}`")


def _num_bytes(row: Row) -> int:
    return sum(len(str(message["content"]).encode()) for message in row.messages)
