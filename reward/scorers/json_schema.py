"""JSON schema: the answer must be JSON that follows a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, Self

from pydantic import Field, model_validator

from tandem.protos.contracts import FAULT, Score, Scored, ScoreItem, Unscored
from tandem.protos.error_text import shown
from tandem.reward.contracts import Scorer
from tandem.reward.scorers.tags import check_names
from tandem.reward.text.values import last_code_block, last_tagged, unusable

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_MAX_DEPTH = 100
_MAX_DIGITS = 4000


class _BeyondError(ValueError):
    """The answer is JSON that exceeds this scorer's limits."""


class JsonSchema(Scorer):
    """1 if the answer is JSON that follows the schema, `format_score` if it is other JSON, else 0.

    The schema is a parameter or the item's ground truth (an object, or its JSON text), of draft 2020-12 unless
    `$schema` names another. Formats (`date`, `uri`) are not enforced. References resolve within the schema and to the
    drafts, never over the network. A pattern may backtrack forever, so this scorer runs in a worker process. JSON
    nested deeper than 100 levels and numbers of more than 4,000 digits score as no JSON does, with `fault/limit` in the
    breakdown.

    Example:
        >>> JsonSchema(schema='{"type": "object", "required": ["city"]}').judge(ScoreItem("", '{"city": "Oslo"}', None))
        Scored(value=1.0, breakdown={'json': 1.0})
    """

    VERSION = "2"
    ISOLATION = "worker"
    PRELOAD = ("jsonschema",)

    json_schema: Annotated[str, Field(alias="schema")] = ""
    """The schema as JSON text; empty: each item's ground truth is its schema."""
    source: Literal["auto", "answer", "code_block"] = "auto"
    """Where the JSON is: the whole answer, or its last code block; `auto`: the code block if there is one."""
    tag: str = ""
    """If set, only the content of the last `<tag>…</tag>` is read; an answer without the tag scores 0."""
    format_score: float = 0.0
    """Score of JSON that does not follow the schema."""

    @model_validator(mode="after")
    def _schema_is_one(self) -> Self:
        check_names([self.tag] if self.tag else [])
        if self.json_schema:
            try:
                _validator(self.json_schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"schema {_one_line(error)}") from None
        return self

    def judge(self, item: ScoreItem) -> Score:
        schema = self.json_schema or _schema_text(item.ground_truth)
        if schema is None:
            return unusable(item.ground_truth, "no JSON schema (an object, true, false, or the JSON text of one)")
        try:
            validator = _validator(schema)
        except (ValueError, RecursionError) as error:
            return unusable(item.ground_truth, f"no schema to judge by: it {_one_line(error)}")
        text = self._json_text(item.solution)
        if text is None:
            return Scored(0.0, {"json": 0.0})
        try:
            value = _read(text)
        except _BeyondError:
            return Scored(min(0.0, self.format_score), {"json": 0.0, f"{FAULT}limit": 1.0})
        except ValueError:
            return Scored(0.0, {"json": 0.0})
        return self._validated(validator, value)

    def _validated(self, validator: Validator, value: object) -> Score:
        from jsonschema.exceptions import SchemaError
        from referencing.exceptions import Unresolvable

        try:
            follows = validator.is_valid(value)
        except (Unresolvable, SchemaError, re.error) as error:
            return Unscored("invalid_input", f"the schema cannot be applied: {_one_line(error)}")
        except RecursionError:
            told = "the schema leads deeper than this scorer follows: does it refer to itself without end?"
            return Unscored("limit", told)
        return Scored(1.0 if follows else self.format_score, {"json": 1.0})

    def _json_text(self, solution: str) -> str | None:
        text = last_tagged(solution, self.tag) if self.tag else solution
        if text is None or self.source == "answer":
            return text
        block = last_code_block(text)
        return block if block is not None or self.source == "code_block" else text


def _schema_text(ground_truth: object) -> str | None:
    if not isinstance(ground_truth, Mapping | bool):
        return ground_truth if isinstance(ground_truth, str) else None
    try:
        return json.dumps(ground_truth)
    except (TypeError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=64)
def _validator(text: str) -> Validator:
    """A validator of the schema with this JSON text. Raises ValueError if it is no schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    schema = _read(text)
    if not isinstance(schema, dict | bool):
        raise ValueError(f"is {shown(schema)}, not an object")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"is no valid schema: {error.message:.200}, at {error.json_path:.100}") from None
    return kind(schema, registry=REGISTRY)  # this registry resolves references without fetching anything


def _read(text: str) -> object:
    """The value of a JSON text. Raises ValueError; _BeyondError if it is too deep or a number too long."""
    try:
        value = json.loads(text, parse_int=_integer, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error}") from None
    except RecursionError:
        raise _BeyondError(f"is nested deeper than {_MAX_DEPTH}") from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [inner for one in level for inner in _children(one)]
        if not level:
            return value
    raise _BeyondError(f"is nested deeper than {_MAX_DEPTH}")


def _children(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise _BeyondError(f"has a number of {len(digits)} digits")
    return int(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"is no JSON: {constant} is no number there")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{error}".split())[:300] or type(error).__name__
