"""The tables and keys that a pydantic model of options describes: recipe, arguments of a scorer, file of a rubric; and
values written as TOML.

Shapes are read from annotations, documentation from docstrings: of a class its summary, of a field the string below it.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from tandem.protos.options import BareName

_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything", NoneType: "nothing"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a key holds: a value (no models), a table ({"": model}), or one of several ({name: model}) by `chooser`."""

    annotation: object
    models: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    chooser: str = ""
    bare: BareName | None = None
    """What a bare string in the table's place stands for; None if a string cannot stand there."""
    optional: bool = False
    """Whether nothing may stand there."""
    many: bool = False
    """Whether it is a list of such tables."""
    rules: tuple[Any, ...] = ()
    """Limits and validators of the value."""

    @property
    def is_table(self) -> bool:
        return bool(self.models) and not self.many

    @property
    def naming_key(self) -> str:
        """The key that says which table it is, "" if none does."""
        return self.bare.key if self.bare is not None else self.chooser

    @property
    def is_union(self) -> bool:
        """Whether it is a value of one of several types."""
        return not self.models and get_origin(self.annotation) in (Union, UnionType)


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a model by the keys that users write."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def shape_of(info: FieldInfo) -> Shape:
    """The shape of a model's field."""
    return _shape(info.annotation, tuple(info.metadata), _text(info.discriminator))


def shape_at(root: type[BaseModel], keys: Sequence[str]) -> Shape | None:
    """The shape of a dotted key below `root`, of the first choice that has it; None if nobody knows it."""
    shape = Shape(root, {"": root})
    for key in keys:
        found = [fields_of(model)[key] for model in shape.models.values() if key in fields_of(model)]
        if not found or shape.many:
            return None
        shape = shape_of(found[0])
    return shape


def _shape(annotation: Any, rules: tuple[object, ...], chooser: str) -> Shape:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        info = FieldInfo.from_annotation(annotation)
        return _shape(info.annotation, (*rules, *info.metadata), chooser or _text(info.discriminator))
    if origin in (Union, UnionType):
        members = [member for member in arguments if member is not NoneType]
        optional = len(members) < len(arguments)
        if len(members) == 1:
            return replace(_shape(members[0], rules, chooser), optional=optional)
        models = {name: member for member in members for name in _names_in(member, chooser)}
        if models:
            return Shape(annotation, models, chooser, _bare_name(rules), optional)
        return Shape(annotation, optional=optional, rules=rules)
    if origin in (tuple, list):
        inner = _shape(arguments[0], (), "")
        if inner.models:
            return replace(inner, annotation=annotation, many=True, rules=rules)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Shape(annotation, {"": annotation}, bare=_bare_name(rules))
    return Shape(annotation, rules=rules)


def _bare_name(rules: tuple[object, ...]) -> BareName | None:
    functions = [rule.func for rule in rules if isinstance(rule, BeforeValidator)]
    return next((function for function in functions if isinstance(function, BareName)), None)


def _text(discriminator: object) -> str:
    return discriminator if isinstance(discriminator, str) else ""


def _names_in(member: object, chooser: str) -> Sequence[str]:
    """The names under which a member of a union is chosen; none if it is not chosen by name."""
    if not chooser or not isinstance(member, type) or not issubclass(member, BaseModel):
        return ()
    return get_args(member.model_fields[chooser].annotation)


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a configuration."""

    path: str
    """How a recipe heads it; `a.b[]` for a list of them."""
    model: type[BaseModel]
    shape: Shape
    """What its place may hold."""
    choice: str = ""
    """The name it is chosen by, "" if it is no choice."""
    default: object = None
    """What stands in its place if a recipe says nothing."""

    @property
    def default_choice(self) -> str:
        """The name of the table that stands there if a recipe says nothing, "" for none."""
        return str(getattr(self.default, self.shape.chooser, "")) if self.shape.chooser else ""

    def fields(self) -> Iterator[tuple[str, FieldInfo]]:
        """Its keys, without the one it is chosen by."""
        for name, info in fields_of(self.model).items():
            if name != self.shape.chooser:
                yield name, info

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def tables(root: type[BaseModel], path: str = "") -> Iterator[Table]:
    """Every table below `root`, its own one aside, a table before those inside it."""
    for name, info in fields_of(root).items():
        shape = shape_of(info)
        inner = (f"{path}.{name}" if path else name) + ("[]" if shape.many else "")
        for choice, model in shape.models.items():
            yield Table(inner, model, shape, choice, default_of(info))
            yield from tables(model, inner)


def default_of(info: FieldInfo) -> Any:
    """A field's default; None, too, for one that must be given."""
    return None if info.is_required() else info.get_default(call_default_factory=True)


def known_keys(root: type[BaseModel]) -> list[str]:
    """Every table and every dotted key below `root`, once each."""
    found = dict.fromkeys(fields_of(root))
    for table in tables(root):
        found[table.path] = None
        found |= dict.fromkeys(map(table.key, fields_of(table.model)))
    return list(found)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a fault is: the place as a user writes it, and the table that has it."""

    place: str
    table: Table
    shape: Shape | None
    """What the place should hold; None: the key is unknown."""
    inside: bool = False
    """The fault is in an entry of the value, e.g. of a list of numbers."""


def locate(root: type[BaseModel], parts: Iterable[str | int]) -> Location:
    """The place behind a location of pydantic's, which contains the names by which tables were chosen."""
    shape = Shape(root, {"": root})
    table, place = Table("", root, shape), ""
    is_table, inside = True, False  # is_table: `table` is what the place holds
    for part in parts:
        if is_table:
            place = table.key(str(part))
            info = fields_of(table.model).get(str(part))
            if info is None:
                return Location(place, table, None)
            shape, is_table = shape_of(info), False
            if shape.is_table and not shape.chooser:
                table, is_table = Table(place, shape.models[""], shape), True
        elif shape.many and isinstance(part, int):
            place = f"{place}[{part}]"
            shape = replace(shape, many=False, rules=())
            if not shape.chooser:
                table, is_table = Table(place, shape.models[""], shape), True
        elif shape.models:
            table, is_table = Table(place, shape.models[str(part)], shape, str(part)), True
        elif not (shape.is_union and isinstance(part, str)):  # a part that names one of a value's types says nothing
            inside = True
            place += f".{part}" if isinstance(part, str) else ""
    return Location(place, table, shape, inside)


def type_words(shape: Shape) -> str:
    """A value's type and limits in words: `integer ≥ 1`, `"grpo" or "dr_grpo"`, `name or table`."""
    limits = []
    for rule in shape.rules:
        limits += [f"{sign} {getattr(rule, name)}" for name, sign in _SIGNS.items() if hasattr(rule, name)]
        if isinstance(rule, annotated_types.Len | annotated_types.MinLen) and rule.min_length == 1:
            limits.append("that is not empty")
        elif getattr(rule, "pattern", None):
            limits.append(f"like `{rule.pattern}`")
    return " ".join([_table_words(shape) or _words(shape.annotation), ", ".join(limits)]).strip()


def _table_words(shape: Shape) -> str:
    if shape.many or not shape.models:
        return "list of tables" if shape.many else ""
    return f"{shape.bare.key} or table" if shape.bare is not None else "table"


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_words(argument) for argument in arguments if argument is not NoneType)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"list of {len(arguments)} {_plural(arguments[0])}"
    if origin in (tuple, list):
        return f"list of {_plural(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    if origin in (dict, Mapping):
        return "table" if arguments[1] is Any else f"table of {_plural(arguments[1])}"
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _plural(annotation: object) -> str:
    words = _words(annotation)
    return f"{words}s" if words in ("integer", "number", "table") else words


def summary(kind: type) -> str:
    """The first paragraph of a class's docstring, in one line."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def attribute_docs(kind: type) -> dict[str, str]:
    """The string below each field of a class, its own or inherited, in one line. Empty if there is no source."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        with suppress(OSError, TypeError):
            docs |= _own_docs(owner)
    return docs


@cache  # reading and parsing source takes long, and subclasses share their bases
def _own_docs(kind: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for one, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[one.target.id] = " ".join(after.value.value.split())
    return docs


def toml_of(value: object) -> str:
    """A value as TOML text. Keys without a value are left out, since TOML cannot express them."""
    if isinstance(value, Mapping):
        items = (f"{_toml_key(key)} = {toml_of(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_of, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return _toml_text(value) if isinstance(value, str) else json.dumps(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key, re.ASCII) else _toml_text(key)


def _toml_text(text: str) -> str:
    """A JSON string is a TOML basic string, except for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
