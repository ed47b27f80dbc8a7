"""Checks that a run's training data has a usable prompt. Loads neither transformers nor torch."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from tandem.protos.errors import DataError, ModelError
from tandem.services.config import Recipe
from tandem.services.data.dataset import Row
from tandem.services.data.mixture import Mixture

CHECKED_ROWS = 100_000
"""Larger datasets are not checked. The check ends at the first prompt that fits, so it rarely reads all rows."""


def check_prompts(recipe: Recipe) -> None:
    """Checks that at least one row has a prompt of at most `data.max_prompt_tokens`.

    Counts the tokens of the messages without the chat template, which can only add tokens. Skips models without
    tokenizer.json and datasets with more than `CHECKED_ROWS` rows, whose faults the feed reports.

    Raises:
        DataError: no row of the training files makes a usable prompt.
        ModelError: tokenizer.json cannot be read.
    """
    limit = recipe.data.max_prompt_tokens
    file = Path(recipe.model.path) / "tokenizer.json"
    dataset = Mixture(recipe.data.train_files)
    if not file.is_file() or len(dataset) > CHECKED_ROWS:
        return
    from tokenizers import Tokenizer  # not part of the client-only installation

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ModelError(f"model.path {recipe.model.path}: tokenizer.json cannot be read: {error}") from error
    rows = (row for row in (dataset.row(index, 0) for index in range(len(dataset))) if isinstance(row, Row))
    shortest: int | None = None
    for row in islice(rows, CHECKED_ROWS):
        contents = (str(message["content"]) for message in row.messages)
        length = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in contents)
        if length <= limit:
            return
        shortest = min(length, shortest or length)
    why = f"the shortest has {shortest} tokens and data.max_prompt_tokens is {limit}" if shortest else "no prompt"
    raise DataError(f"dataset {dataset.name} has no usable row ({why}); see `tandem data check {dataset.name}`")
