"""Regular expressions as scorers' parameters."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator


def _checked(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_checked)]
"""A regular expression of Python's `re`."""
