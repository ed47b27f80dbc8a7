"""Explains a configuration error in one line."""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from tandem.reward.options import errors
from tandem.reward.options.tree import locate
from tandem.services.config.other_names import explain_other_name


def explain(root: type[BaseModel], error: ValidationError) -> str:
    """Describes the first fault of `error`, its place and, if known, the remedy. For a renamed key or a key of another
    trainer, names the key to use.
    """
    fault = errors.first_fault(error)
    if fault["type"] == "extra_forbidden":
        known_elsewhere = explain_other_name(locate(root, fault["loc"]).place, fault["input"])
        if known_elsewhere:
            return known_elsewhere
    return errors.explain(root, error)
