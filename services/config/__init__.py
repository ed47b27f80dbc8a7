"""The configuration: a recipe read from a file with dotted overrides. `recipe` defines and loads it, and `faults`
explains its errors.
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
