"""The configuration: a recipe read from a file with dotted overrides."""

from tandem.services.config.recipe import (
    Recipe,
    dump_recipe,
    load_recipe,
    load_resolved,
    parse_recipe,
    without_secrets,
)

__all__ = ["Recipe", "dump_recipe", "load_recipe", "load_resolved", "parse_recipe", "without_secrets"]
