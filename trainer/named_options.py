"""Tables that may be written as a bare name: `loss = "gspo"` for `loss = { name = "gspo" }`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, Union

from pydantic import BaseModel, BeforeValidator, Field

from tandem.protos.errors import PluginError
from tandem.protos.options import BareName
from tandem.protos.plugins import find_plugins

Model = TypeVar("Model", bound=BaseModel)


def named(default: str, *, key: str = "name", elsewhere: Mapping[str, str] = MappingProxyType({})) -> BeforeValidator:
    """For `Annotated[OneOfSeveral, named("rloo")]`; see `BareName`."""
    return BeforeValidator(BareName(key, default, elsewhere))


def one_of(models: Mapping[str, type[BaseModel]]) -> Any:
    """The type of a field that holds one of several models, chosen by the key `name`."""
    return Annotated[Union[tuple(models.values())], Field(discriminator="name")]  # noqa: UP007


def models_by_name(built_in: Iterable[type[Model]], group: str, base: type[Model]) -> dict[str, type[Model]]:
    """name → options model: the built-in ones, then those of an entry point group. Raises PluginError if an entry point
    cannot be used.
    """
    models = {model.model_fields["name"].default: model for model in built_in}
    for name, load in find_plugins(group, base, models).items():
        model = load()
        if model.model_fields["name"].default != name:
            path = f"{model.__module__}:{model.__name__}"
            raise PluginError(f"entry point {group}: {name}: the default of `name` in {path} must be {name!r}")
        models[name] = model
    return models
