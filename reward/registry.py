"""Which scorers there are, and how a recipe's `[reward]` becomes one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from protos.contracts import Score, ScoreItem, Scorer
from protos.errors import ScorerError
from reward.exact import ExactMatch
from reward.function import load_function
from reward.numeric import NumericEquality
from reward.regex import RegexMatch

if TYPE_CHECKING:
    from reward.config import RewardConfig


class Judge(Protocol):
    """Judges one answer. May hang or take the process down if it runs user's code or a user's pattern."""

    def judge(self, item: ScoreItem) -> Score: ...


class RunningScorer(Scorer, Protocol):
    """A scorer that holds processes until it is closed."""

    def close(self) -> None: ...


BUILT_IN: dict[str, type[ExactMatch] | type[RegexMatch] | type[NumericEquality]] = {
    "exact": ExactMatch,
    "regex": RegexMatch,
    "numeric": NumericEquality,
}
_IN_PROCESS = frozenset({"exact", "numeric"})  # code of ours, linear in the answer's length: they need no guard


class InProcessScorer:
    """Scores where it is called, for judges that can neither hang nor crash."""

    def __init__(self, name: str, judge: Judge) -> None:
        self.name = name
        self._judge = judge

    def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        return [self._judge.judge(item) for item in items]

    def close(self) -> None:
        """Holds nothing."""


def make_judge(scorer: str, arguments: Mapping[str, Any]) -> Judge:
    """The judge of a name or an import path. Imports user's code, so it runs in a worker unless the scorer is built in.

    Raises:
        ScorerError: see `build_scorer`.
    """
    if scorer in BUILT_IN:
        return _make_built_in(scorer, arguments)
    place, sign, function = scorer.rpartition(":")
    if sign and place and function.isidentifier():
        return load_function(scorer, arguments)
    near = difflib.get_close_matches(scorer, BUILT_IN, n=1)
    raise ScorerError(
        f"reward.scorer {scorer!r} is unknown; "
        + (f"did you mean {near[0]}? " if near else "")
        + f"There are {', '.join(BUILT_IN)}, module.path:function and path/to/file.py:function"
    )


def build_scorer(config: RewardConfig) -> RunningScorer:
    """The scorer of `[reward]`, ready to score; close it when done.

    Raises:
        ScorerError: the name is unknown (the nearest known one is named), an argument does not fit, or the function's module
            does not import.
    """
    if config.scorer in _IN_PROCESS:
        return InProcessScorer(config.scorer, make_judge(config.scorer, config.arguments))
    if config.scorer in BUILT_IN or ":" not in config.scorer:
        make_judge(config.scorer, config.arguments)  # refuses what is wrong before a process is started

    from reward.pool import ScorerPool  # the workers import this module and need no pool of their own

    return ScorerPool(
        config.scorer, config.arguments, num_workers=config.num_workers, timeout_seconds=config.timeout_seconds
    )


def validate(config: RewardConfig) -> None:
    """Raises the ScorerError that `build_scorer` would. Imports user's code in a worker process, not in the caller."""
    build_scorer(config.model_copy(update={"num_workers": 1})).close()


def _make_built_in(scorer: str, arguments: Mapping[str, Any]) -> Judge:
    kind = BUILT_IN[scorer]
    parameters = inspect.signature(kind).parameters
    for name, value in arguments.items():
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            raise ScorerError(
                f"reward.arguments.{name}: scorer {scorer} has no such argument; "
                + (f"did you mean {near[0]}? " if near else "")
                + f"It takes {', '.join(parameters)}"
            )
        _check_type(scorer, name, value, str(parameters[name].annotation))
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in arguments]
    if missing:
        raise ScorerError(f"reward.arguments.{missing[0]} is missing: scorer {scorer} needs it")
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ScorerError(f"reward.arguments of scorer {scorer}: {error}") from None


def _check_type(scorer: str, name: str, value: Any, annotation: str) -> None:
    accepted: dict[str, tuple[type, ...]] = {"float": (int, float), "str": (str,), "bool": (bool,)}
    fits = isinstance(value, accepted[annotation]) and not (annotation == "float" and isinstance(value, bool))
    if not fits:
        raise ScorerError(f"reward.arguments.{name}: scorer {scorer} needs a {annotation} there, got {value!r}")
