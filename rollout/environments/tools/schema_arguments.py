"""The arguments of a tool that brings its own JSON schema."""

from __future__ import annotations

from collections.abc import Mapping

import jsonschema

from tandem.protos.contracts import JsonObject
from tandem.rollout.environments.loading import ContractError
from tandem.rollout.environments.tools.function_schema import ArgumentError


class SchemaArguments:
    """Arguments that fit a tool's schema are taken as they are."""

    def __init__(self, schema: JsonObject, source: str) -> None:
        parameters = schema["function"].get("parameters", {"type": "object", "properties": {}})
        try:
            jsonschema.Draft202012Validator.check_schema(parameters)
        except jsonschema.SchemaError as error:
            raise ContractError(f"{source}: {schema['function']['name']}: no JSON schema: {error.message}") from None
        self._validator = jsonschema.Draft202012Validator(parameters)
        self.properties = frozenset(parameters.get("properties", {}))

    def convert(self, given: JsonObject) -> Mapping[str, object]:
        faults = [error.message for error in self._validator.iter_errors(given)]
        if faults:
            raise ArgumentError("; ".join(faults))
        return given
