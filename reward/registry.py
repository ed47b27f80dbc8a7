"""Which scorers there are, what parameters they take, and how a name with arguments becomes a judge."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Iterable, Mapping
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Literal, Union

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from tandem.protos.contracts import Parameter, ScorerInfo
from tandem.protos.errors import ScorerError
from tandem.reward.contracts import AnyJudge, Isolation
from tandem.reward.docstrings import attribute_docs, summary
from tandem.reward.scorers.code import CodeTests
from tandem.reward.scorers.exact import ExactMatch
from tandem.reward.scorers.format import Format
from tandem.reward.scorers.function import load_function, source_version
from tandem.reward.scorers.group_rank import GroupRank
from tandem.reward.scorers.gsm8k import Gsm8k
from tandem.reward.scorers.json_schema import JsonSchema
from tandem.reward.scorers.judge import GenerativeJudge
from tandem.reward.scorers.language import LanguageConsistency
from tandem.reward.scorers.math_boxed import MathBoxed
from tandem.reward.scorers.math_dapo import MathDapo
from tandem.reward.scorers.multiple_choice import MultipleChoice
from tandem.reward.scorers.numeric import NumericEquality
from tandem.reward.scorers.overlong import Overlong
from tandem.reward.scorers.pairwise import Pairwise
from tandem.reward.scorers.regex import RegexMatch
from tandem.reward.scorers.remote import RemoteScorer
from tandem.reward.scorers.repetition import Repetition
from tandem.reward.scorers.reward_model import RewardModel
from tandem.reward.scorers.short_answer import ShortAnswer
from tandem.reward.scorers.symbolic_math import MathVerify
from tandem.reward.scorers.tags import Tags
from tandem.reward.scorers.target_length import TargetLength

BUILT_IN: dict[str, type[Any]] = {
    "code": CodeTests,
    "exact": ExactMatch,
    "format": Format,
    "group_rank": GroupRank,
    "gsm8k": Gsm8k,
    "json_schema": JsonSchema,
    "judge": GenerativeJudge,
    "language": LanguageConsistency,
    "math_boxed": MathBoxed,
    "math_dapo": MathDapo,
    "math_verify": MathVerify,
    "multiple_choice": MultipleChoice,
    "numeric": NumericEquality,
    "overlong": Overlong,
    "pairwise": Pairwise,
    "regex": RegexMatch,
    "remote": RemoteScorer,
    "repetition": Repetition,
    "reward_model": RewardModel,
    "short_answer": ShortAnswer,
    "tags": Tags,
    "target_length": TargetLength,
}
"""One line a scorer, in the order of their names."""

RUBRIC = "rubric"
"""As a component's scorer: another rubric of the same file."""

_REQUIRED = dataclasses.MISSING


@dataclasses.dataclass(frozen=True, slots=True)
class ScorerSpec:
    """A scorer with its arguments, checked. Two that are equal judge alike, so one judge serves both."""

    scorer: str
    arguments: str
    """A JSON object with its keys in order."""
    isolation: Isolation
    grouped: bool = False
    preload: tuple[str, ...] = ()
    longest_seconds: float = 0.0
    """Time of one item until the judge itself ends it, where it says so: a worker is given no less."""
    version: str = ""
    """A built-in scorer's own; of a function, a digest of its file (`reward.function.source_version`)."""

    @property
    def key(self) -> str:
        return f"{self.scorer} {self.arguments}"

    @property
    def runs_in_pool(self) -> bool:
        return self.isolation in ("worker", "sandbox")

    def build(self) -> AnyJudge:
        """The judge. Raises ScorerError as `make_judge`, though not for what was checked before."""
        return make_judge(self.scorer, json.loads(self.arguments))


def is_import_path(scorer: str) -> bool:
    """Whether it reads as `module.path:function` or `file.py:function`."""
    place, sign, function = scorer.rpartition(":")
    return bool(sign and place and function.isidentifier())


def make_spec(
    scorer: str, arguments: Mapping[str, Any], place: str = "reward", known: Iterable[str] = ()
) -> ScorerSpec:
    """Checks a name and its arguments without importing user's code. `known` names what else might have been meant.

    Raises:
        ScorerError: the name is unknown (the nearest known one is named), an argument is unknown, missing or of the
            wrong type.
            Every line begins with the place.
    """
    text = arguments_json(arguments, place)
    if scorer in BUILT_IN:
        kind = BUILT_IN[scorer]
        judge = make_judge(scorer, arguments, place)
        isolation: Isolation = kind.ISOLATION
        grouped, preloaded = getattr(kind, "GROUPED", False), getattr(kind, "PRELOAD", ())
        longest = getattr(judge, "longest_seconds", 0.0)
        return ScorerSpec(scorer, text, isolation, grouped, preloaded, longest, kind.VERSION)
    if is_import_path(scorer):
        return ScorerSpec(scorer, text, "worker", version=source_version(scorer))
    names = [*known, *BUILT_IN]
    near = nearest(scorer, names)
    raise ScorerError(
        f"{place}.scorer {scorer!r:.100} is unknown; "
        + (f"did you mean {near}? " if near else "")
        + f"There are {', '.join(names)}, module.path:function and path/to/file.py:function"
    )


def make_judge(scorer: str, arguments: Mapping[str, Any], place: str = "reward") -> AnyJudge:
    """The judge of a built-in or of an import path. Imports user's code for the latter, so that is for workers to call.

    Raises:
        ScorerError: as `make_spec`; or the function's module does not import.
    """
    if scorer not in BUILT_IN:
        return load_function(scorer, arguments)
    checked = check_arguments(scorer, arguments, place)
    try:
        judge: AnyJudge = BUILT_IN[scorer](**checked)
    except ValueError as error:
        raise ScorerError(f"{place}.arguments of scorer {scorer}: {error}") from None
    return judge


def preload(modules: Iterable[str]) -> None:
    """Imports what a judge will need; a module that is not there is the judge's to complain of."""
    for module in modules:
        try:
            import_module(module)
        except ImportError:
            return


def check_arguments(scorer: str, arguments: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The arguments of a built-in scorer as its fields want them (a list becomes a tuple where a tuple is asked for).

    Raises:
        ScorerError: one is unknown, missing or of the wrong type.
    """
    fields = _parameters(BUILT_IN[scorer])
    checked = {}
    for name, value in arguments.items():
        if name not in fields:
            near = nearest(name, fields)
            raise ScorerError(
                f"{place}.arguments.{printable(name)}: scorer {scorer} has no such argument; "
                + (f"did you mean {near}? " if near else "")
                + (f"It takes {', '.join(fields)}" if fields else "It takes none")
            )
        checked[name] = _checked(scorer, fields[name], value, place)
    for name, field in fields.items():
        if name not in arguments and field.required:
            raise ScorerError(f"{place}.arguments.{name} is missing: scorer {scorer} needs it")
    return checked


def arguments_json(arguments: Mapping[str, Any], place: str) -> str:
    """The arguments as JSON text with their keys in order. Raises ScorerError for what JSON cannot hold (a date of
    TOML).
    """
    for name, value in arguments.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ScorerError(f"{place}.arguments.{printable(name)}: {error}") from None
    return json.dumps(dict(arguments), sort_keys=True)


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    try:
        return f"{value!r:.80}"
    except RecursionError:
        return f"a {type(value).__name__} too deep to show"


def printable(name: str) -> str:
    """A word of the user's for a message: one line, not too long."""
    return name if name.isprintable() and len(name) <= 80 else f"{name[:80]!r}"


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, "" if none is near."""
    return next(iter(difflib.get_close_matches(word[:200], list(known), n=1, cutoff=0.5)), "")


def describe() -> list[ScorerInfo]:
    """Every built-in scorer, in the order of their names."""
    return [_describe(name, BUILT_IN[name]) for name in sorted(BUILT_IN)]


def _describe(name: str, kind: type[Any]) -> ScorerInfo:
    docs = attribute_docs(kind)
    parameters = tuple(
        Parameter(field.name, type_words(field.annotation), field.default_json, docs.get(field.name, ""))
        for field in _parameters(kind).values()
    )
    return ScorerInfo(name, kind.VERSION, summary(kind), parameters, kind.ISOLATION)


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    name: str
    annotation: Any
    adapter: TypeAdapter[Any]
    required: bool
    default_json: str


_FIELDS: dict[type[Any], dict[str, _Field]] = {}  # building a validator takes longer than using it


def _parameters(kind: type[Any]) -> dict[str, _Field]:
    if kind not in _FIELDS:
        _FIELDS[kind] = _read_parameters(kind)
    return _FIELDS[kind]


def _read_parameters(kind: type[Any]) -> dict[str, _Field]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: _Field(
            field.name, hints[field.name], TypeAdapter(hints[field.name]), _is_required(field), _default_json(field)
        )
        for field in dataclasses.fields(kind)
        if field.init
    }


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is _REQUIRED and field.default_factory is _REQUIRED


def _default_json(field: dataclasses.Field[Any]) -> str:
    if _is_required(field):
        return ""
    default = field.default if field.default_factory is _REQUIRED else field.default_factory()
    return to_json(default, inf_nan_mode="constants").decode()


def _checked(scorer: str, field: _Field, value: Any, place: str) -> Any:
    """As JSON, strictly: a list may be a tuple there and an integer a number, and nothing else becomes what it
    is not.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ScorerError(f"{place}.arguments.{field.name}: {error}") from None
    try:
        return field.adapter.validate_json(text, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
    if isinstance(value, float) and not math.isfinite(value):
        reason = "a finite number"
    elif (
        fault["type"].endswith(("_type", "_parsing", "literal_error", "missing", "too_short", "too_long"))
        or "ctx" not in fault
    ):
        reason = type_words(field.annotation)
    else:
        reason = fault["msg"].removeprefix("Input should be ")
    near = nearest(value, _choices(field.annotation)) if isinstance(value, str) else ""
    meant = f"; did you mean {near}?" if near else ""
    raise ScorerError(
        f"{place}.arguments.{field.name}: scorer {scorer} needs {reason} there, got {shown(value)}{meant}"
    )


_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    Any: "anything",
    type(None): "nothing",
}


def type_words(annotation: Any) -> str:
    """A parameter's type in words: `a number`, `"min" or "mean"`, `a list of text`."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_words(inner[0])
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in inner)
    if origin in (Union, UnionType):
        return " or ".join(type_words(one) for one in inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"a list of {len(inner)} ({', '.join(type_words(one) for one in inner)})"
    if origin in (tuple, list):
        return f"a list ({type_words(inner[0])})"
    if origin in (dict, Mapping) or getattr(origin, "__name__", "") == "Mapping":
        return f"a table ({type_words(inner[1])})"
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Annotated:
        return _choices(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is not Literal:
        return []
    return [choice for choice in typing.get_args(annotation) if isinstance(choice, str)]
