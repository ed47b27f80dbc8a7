"""The scorers: found by name, built from a name and its arguments, described for clients.

Every module of `reward/scorers/` holds one scorer, the class derived from `Scorer`; its name is the file's. The
modules are listed without being imported, and one is imported when its scorer is first asked for: sympy is loaded for
symbolic mathematics only.
"""

from __future__ import annotations

import difflib
import json
import pkgutil
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from tandem.protos.contracts import Parameter, ScorerInfo
from tandem.protos.errors import ScorerError
from tandem.reward import scorers
from tandem.reward.contracts import AnyJudge, Isolation, Scorer
from tandem.reward.docstrings import attribute_docs, summary
from tandem.reward.workers.function import load_function, source_version

RUBRIC = "rubric"
"""As a component's scorer: another rubric of the same file."""


class ScorerRegistry(MutableMapping[str, type[Scorer]]):
    """Scorers by name, in alphabetical order. Looking one up imports its module; listing the names imports none."""

    def __init__(self) -> None:
        self._loaders = dict(_find_scorers())
        self._classes: dict[str, type[Scorer]] = {}

    def __getitem__(self, name: str) -> type[Scorer]:
        if name not in self._classes:
            self._classes[name] = self._loaders[name]()
        return self._classes[name]

    def __setitem__(self, name: str, scorer: type[Scorer]) -> None:
        self._classes[name] = scorer

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._loaders or name in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({**self._loaders, **self._classes}))

    def __len__(self) -> int:
        return len({**self._loaders, **self._classes})


def _find_scorers() -> Iterator[tuple[str, Callable[[], type[Scorer]]]]:
    """The name of every scorer there is, with what loads it."""
    for module in pkgutil.iter_modules(scorers.__path__):
        yield module.name, partial(_scorer_in, f"{scorers.__name__}.{module.name}")


def _scorer_in(module: str) -> type[Scorer]:
    """The scorer that a module defines."""
    values = vars(import_module(module)).values()
    found = [one for one in values if isinstance(one, type) and issubclass(one, Scorer)]
    found = [one for one in found if one.__module__ == module]
    assert len(found) == 1, f"{module} must define one scorer, it defines {len(found)}"
    return found[0]


SCORERS = ScorerRegistry()


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """A scorer with its arguments, checked. Equal specs judge alike, so one judge serves both."""

    scorer: str
    arguments: str
    """A JSON object with its keys in order."""
    isolation: Isolation
    grouped: bool = False
    preload: tuple[str, ...] = ()
    longest_seconds: float = 0.0
    """Time within which the judge itself ends an item, 0 if it does not; a worker is given no less."""
    version: str = ""
    """The scorer's own; of a function, a digest of its file (`tandem.reward.workers.function.source_version`)."""

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
    """Checks a name and its arguments without importing user's code. `known` are more names that may have been meant.

    Raises:
        ScorerError: the name is unknown (the nearest known one is named), or an argument is unknown, missing or of the
            wrong type. The line begins with the place.
    """
    text = arguments_json(arguments, place)
    if scorer in SCORERS:
        made = make_scorer(scorer, arguments, place)
        return ScorerSpec(scorer, text, made.ISOLATION, made.GROUPED, made.PRELOAD, made.longest_seconds, made.VERSION)
    if is_import_path(scorer):
        return ScorerSpec(scorer, text, "worker", version=source_version(scorer))
    names = [*known, *SCORERS]
    near = nearest(scorer, names)
    raise ScorerError(
        f"{place}.scorer {scorer!r:.100} is unknown; "
        + (f"did you mean {near}? " if near else "")
        + f"There are {', '.join(names)}, module.path:function and path/to/file.py:function"
    )


def make_judge(scorer: str, arguments: Mapping[str, Any], place: str = "reward") -> AnyJudge:
    """The judge of a scorer or of an import path. Imports user's code for the latter, so only workers call it then.

    Raises:
        ScorerError: as `make_spec`; or the function's module does not import.
    """
    if scorer not in SCORERS:
        return load_function(scorer, arguments)
    return cast(AnyJudge, make_scorer(scorer, arguments, place))


def make_scorer(scorer: str, arguments: Mapping[str, Any], place: str = "reward") -> Scorer:
    """The scorer of a name with its arguments as JSON has them: a list may be a tuple, an integer a number, and nothing
    else is converted.

    Raises:
        ScorerError: an argument is unknown, missing or of the wrong type.
    """
    kind = SCORERS[scorer]
    try:
        return kind.model_validate_json(arguments_json(arguments, place))
    except ValidationError as error:
        raise ScorerError(_explained(scorer, kind, error, arguments, place)) from None


def preload(modules: Iterable[str]) -> None:
    """Imports what a judge will need. A missing module is left for the judge to report."""
    for module in modules:
        try:
            import_module(module)
        except ImportError:
            return


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
    """Every scorer, in the order of their names."""
    return [_describe(name, kind) for name, kind in SCORERS.items()]


def _describe(name: str, kind: type[Scorer]) -> ScorerInfo:
    docs = attribute_docs(kind)
    parameters = tuple(
        Parameter(info.alias or key, type_words(info.annotation), _default_json(info), docs.get(key, ""))
        for key, info in kind.model_fields.items()
    )
    return ScorerInfo(name, kind.VERSION, summary(kind), parameters, kind.ISOLATION)


def _default_json(info: FieldInfo) -> str:
    if info.is_required():
        return ""
    return to_json(info.get_default(call_default_factory=True), inf_nan_mode="constants").decode()


def _explained(
    scorer: str, kind: type[Scorer], error: ValidationError, arguments: Mapping[str, Any], place: str
) -> str:
    """The first fault in one line."""
    faults = error.errors()
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    fields = {info.alias or key: info for key, info in kind.model_fields.items()}
    name = str(fault["loc"][0]) if fault["loc"] else ""
    if fault["type"] == "extra_forbidden":
        near = nearest(name, fields)
        return (
            f"{place}.arguments.{printable(name)}: scorer {scorer} has no such argument; "
            + (f"did you mean {near}? " if near else "")
            + (f"It takes {', '.join(fields)}" if fields else "It takes none")
        )
    if fault["type"] == "missing" and len(fault["loc"]) == 1:
        return f"{place}.arguments.{name} is missing: scorer {scorer} needs it"
    message = fault["msg"].removeprefix("Value error, ")
    if not name:
        return f"{place}.arguments of scorer {scorer}: {message}"
    value = arguments[name]
    if fault["type"] == "value_error":
        return f"{place}.arguments.{name}: {message} (got {shown(value)})"
    wrong_type = "ctx" not in fault or fault["type"].endswith(
        ("_type", "_parsing", "literal_error", "missing", "too_short", "too_long")
    )
    reason = type_words(fields[name].annotation) if wrong_type else message.removeprefix("Input should be ")
    near = nearest(value, _choices(fields[name].annotation)) if isinstance(value, str) else ""
    meant = f"; did you mean {near}?" if near else ""
    return f"{place}.arguments.{name}: scorer {scorer} needs {reason} there, got {shown(value)}{meant}"


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
