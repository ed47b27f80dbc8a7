"""Ground truths: the texts that one accepts, and the result for one that cannot be used."""

from __future__ import annotations

from tandem.protos.contracts import Unscored
from tandem.protos.error_text import shown

MAX_ACCEPTED = 1000
"""Maximum number of texts that a ground truth may accept: each is compared with the whole answer."""


def accepted_texts(ground_truth: object) -> list[str] | None:
    """The texts that a ground truth accepts, stripped; None if it is not a text, a number or a list of those, or if the
    list is too long.
    """
    alternatives = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not 0 < len(alternatives) <= MAX_ACCEPTED or not all(isinstance(one, str | int | float) for one in alternatives):
        return None
    try:
        return [str(one).strip() for one in alternatives]
    except ValueError:
        return None  # an integer of more digits than Python writes


def unusable(ground_truth: object, wanted: str = "neither text, number nor list of those") -> Unscored:
    """The result for an item whose ground truth cannot be used. `wanted` says what is wrong, as a phrase after "is"."""
    if isinstance(ground_truth, list | tuple) and len(ground_truth) > MAX_ACCEPTED:
        wanted = f"a list of {len(ground_truth):,}, at most {MAX_ACCEPTED:,} are compared"
    return Unscored("invalid_input", f"ground truth {shown(ground_truth)} is {wanted}")
