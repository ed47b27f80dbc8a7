"""The configuration: a recipe, as a file and dotted overrides say it. `recipe` composes it, `tree` and `faults` explain
it.
"""

from tandem.services.config.recipe import (
    Recipe,
    apply_overrides,
    dump_recipe,
    known_keys,
    load_recipe,
    load_resolved,
    load_service_config,
    parse_recipe,
    read_values,
)

__all__ = [
    "Recipe",
    "apply_overrides",
    "dump_recipe",
    "known_keys",
    "load_recipe",
    "load_resolved",
    "load_service_config",
    "parse_recipe",
    "read_values",
]
