"""Reads the accepted texts of a ground truth, and builds the result for an unusable ground truth."""

from __future__ import annotations

from tandem.protos.contracts import Unscored
from tandem.protos.error_text import shown

MAX_ACCEPTED = 1000
"""Maximum number of accepted texts of a ground truth, because each is compared with the whole answer."""


def accepted_texts(ground_truth: object) -> list[str] | None:
    """Returns the accepted texts, stripped; None unless the ground truth is a text, a number or a short enough list."""
    alternatives = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not 0 < len(alternatives) <= MAX_ACCEPTED or not all(isinstance(one, str | int | float) for one in alternatives):
        return None
    try:
        return [str(one).strip() for one in alternatives]
    except ValueError:
        return None  # an integer with more digits than Python converts


def unusable(ground_truth: object, wanted: str = "neither text, number nor list of those") -> Unscored:
    """Returns the result for an item with an unusable ground truth. `wanted` is the cause, as a phrase after "is"."""
    if isinstance(ground_truth, list | tuple) and len(ground_truth) > MAX_ACCEPTED:
        wanted = f"a list of {len(ground_truth):,}, at most {MAX_ACCEPTED:,} are compared"
    return Unscored("invalid_input", f"ground truth {shown(ground_truth)} is {wanted}")
