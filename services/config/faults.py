"""What is wrong with a configuration, in one line."""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from tandem.reward.options import errors
from tandem.reward.options.tree import locate
from tandem.services.config.other_names import explain_other_name


def explain(root: type[BaseModel], error: ValidationError) -> str:
    """The first fault of `error`, with its place and, where there is one, the remedy. An unknown key that was renamed,
    or that is another trainer's, names the key to use.
    """
    fault = errors.first_fault(error)
    if fault["type"] == "extra_forbidden":
        known_elsewhere = explain_other_name(locate(root, fault["loc"]).place, fault["input"])
        if known_elsewhere:
            return known_elsewhere
    return errors.explain(root, error)
