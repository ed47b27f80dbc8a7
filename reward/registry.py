"""The scorers: found by name, built from a name and its arguments, described for clients.

Every module of `reward/scorers/` holds one scorer, the class derived from `Scorer`; its name is the file's. The
modules are listed without being imported, and one is imported when its scorer is first asked for: sympy is loaded for
symbolic mathematics only.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import cast

from pydantic import ValidationError
from pydantic_core import to_json

from tandem.protos.contracts import Parameter, ScorerInfo
from tandem.protos.error_text import nearest, printable
from tandem.protos.errors import ScorerError
from tandem.protos.plugins import find_plugins
from tandem.reward import scorers
from tandem.reward.contracts import AnyJudge, Isolation, Scorer
from tandem.reward.options.errors import explain
from tandem.reward.options.tree import attribute_docs, default_of, shape_of, summary, type_words
from tandem.reward.workers.function import load_function, source_version

RUBRIC = "rubric"
"""As a component's scorer: another rubric of the same file."""


class ScorerRegistry(Mapping[str, type[Scorer]]):
    """Scorers by name, in alphabetical order. Looking one up imports its module; listing the names imports none."""

    def __init__(self) -> None:
        self.loaders = _find_scorers()

    def __getitem__(self, name: str) -> type[Scorer]:
        return self.loaders[name]()

    def __contains__(self, name: object) -> bool:
        return name in self.loaders

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.loaders))

    def __len__(self) -> int:
        return len(self.loaders)


def _find_scorers() -> dict[str, Callable[[], type[Scorer]]]:
    """What loads each scorer, built in or an entry point `tandem.scorers`. Raises PluginError for a name used twice."""
    built_in = {
        module.name: partial(_scorer_in, f"{scorers.__name__}.{module.name}")
        for module in pkgutil.iter_modules(scorers.__path__)
    }
    return built_in | find_plugins("tandem.scorers", Scorer, built_in)


@cache
def _scorer_in(module: str) -> type[Scorer]:
    values = vars(import_module(module)).values()
    found = [one for one in values if isinstance(one, type) and issubclass(one, Scorer) and one.__module__ == module]
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
        return make_judge(self.scorer, json.loads(self.arguments))


def is_import_path(scorer: str) -> bool:
    """Whether it reads as `module.path:function` or `file.py:function`."""
    place, sign, function = scorer.rpartition(":")
    return bool(sign and place and function.isidentifier())


def make_spec(
    scorer: str, arguments: Mapping[str, object], place: str = "reward", known: Iterable[str] = ()
) -> ScorerSpec:
    """Checks a name and its arguments without importing user's code. `known` are more names that may have been meant.

    Raises ScorerError if the name is unknown, or an argument is unknown, missing or of the wrong type.
    """
    text = arguments_json(arguments, place)
    if scorer in SCORERS:
        made = make_scorer(scorer, arguments, place)
        return ScorerSpec(scorer, text, made.ISOLATION, made.GROUPED, made.PRELOAD, made.longest_seconds, made.VERSION)
    if is_import_path(scorer):
        return ScorerSpec(scorer, text, "worker", version=source_version(scorer))
    raise unknown_scorer(scorer, [*known, *SCORERS], place, "module.path:function and path/to/file.py:function")


def unknown_scorer(scorer: str, known: Iterable[str], place: str, also: str = "") -> ScorerError:
    """The error for a name that is none of `known`. `also` says what else may be written."""
    names = list(known)
    near = nearest(scorer, names)
    meant = f"did you mean {near}? " if near else ""
    return ScorerError(
        f"{place}.scorer {scorer!r:.100} is unknown; {meant}There are {', '.join(names)}{f', {also}' if also else ''}"
    )


def make_judge(scorer: str, arguments: Mapping[str, object]) -> AnyJudge:
    """The judge of a scorer or of an import path. Imports user's code for the latter, so only workers call it then.

    Raises ScorerError as `make_spec`, or if the function's module does not import.
    """
    return cast(AnyJudge, make_scorer(scorer, arguments)) if scorer in SCORERS else load_function(scorer, arguments)


def make_scorer(scorer: str, arguments: Mapping[str, object], place: str = "reward") -> Scorer:
    """The scorer with arguments as JSON has them: a list may be a tuple, an integer a number. Raises ScorerError."""
    kind = SCORERS[scorer]
    try:
        return kind.model_validate_json(arguments_json(arguments, place))
    except ValidationError as error:
        raise ScorerError(explain(kind, error, f"{place}.arguments")) from None


def preload(modules: Iterable[str]) -> None:
    """Imports what a judge will need. A missing module is left for the judge to report."""
    with suppress(ImportError):
        for module in modules:
            import_module(module)


def arguments_json(arguments: Mapping[str, object], place: str) -> str:
    """The arguments as JSON text with sorted keys. Raises ScorerError for what JSON cannot hold (a date of TOML)."""
    for name, value in arguments.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ScorerError(f"{place}.arguments.{printable(name)}: {error}") from None
    return json.dumps(dict(arguments), sort_keys=True)


def describe() -> list[ScorerInfo]:
    """Every scorer, in the order of their names. Parameters that must be given come first."""
    infos = []
    for name, kind in SCORERS.items():
        docs, parameters = attribute_docs(kind), []
        for field, info in sorted(kind.model_fields.items(), key=lambda one: not one[1].is_required()):
            words = type_words(shape_of(info)).replace("`", "")
            default = "" if info.is_required() else to_json(default_of(info), inf_nan_mode="constants").decode()
            parameters.append(Parameter(info.alias or field, words, default, docs.get(field, "")))
        infos.append(ScorerInfo(name, kind.VERSION, summary(kind), tuple(parameters), kind.ISOLATION))
    return infos
