"""A Python function as scorer, by import path, with verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`.

It runs in worker processes (`reward.pool`), never in the service: user's code may hang, crash, print or leak.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from protos.contracts import Score, Scored, ScoreItem, Unscored
from protos.errors import ScorerError

_MAX_DETAIL = 300


@dataclass(frozen=True, slots=True)
class FunctionJudge:
    """Calls the function and turns whatever it returns or raises into a `Score`."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def judge(self, item: ScoreItem) -> Score:
        try:
            result = self.function(
                data_source=item.data_source,
                solution_str=item.solution,
                ground_truth=item.ground_truth,
                extra_info=dict(item.extra_info),
                **self.arguments,
            )
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except (Exception, SystemExit) as error:
            # A failure is not a score: what the function raised becomes the reason, and the next item is judged as ever.
            place = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            return Unscored("crashed", message[:_MAX_DETAIL])
        return to_score(result)


def to_score(result: Any) -> Score:
    """A number or bool, or a dict with `score` and other components (numeric ones become the breakdown), as a `Score`.

    Anything else, NaN and infinities included, is unscored (`invalid_input`).
    """
    components: Mapping[str, Any] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            return Unscored(
                "invalid_input", f"the function returned a dict without `score`: keys {list(result)!r:.100}"
            )
        components, result = result, result["score"]
    value = _finite(result)
    if value is None:
        what = f"{result}" if isinstance(result, float) else f"{type(result).__name__} {result!r:.80}"
        return Unscored("invalid_input", f"the function returned {what}, not a finite number")
    numbers = {str(name): _finite(part) for name, part in components.items() if name != "score"}
    return Scored(value, {name: number for name, number in numbers.items() if number is not None})


def _finite(value: Any) -> float | None:
    read_scalar = getattr(value, "item", None)  # numpy's and torch's scalars, without importing either
    if callable(read_scalar):
        try:
            value = read_scalar()
        except (TypeError, ValueError, RuntimeError):
            return None  # an array of several numbers
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def load_function(path: str, arguments: Mapping[str, Any]) -> FunctionJudge:
    """The function at `module.path:function` or `file.py:function`, its signature checked against verl's call.

    Raises:
        ScorerError: module or file is missing or does not import, the function is missing, or cannot take the arguments.
    """
    place, _, name = path.rpartition(":")
    module = _import_file(path, Path(place)) if place.endswith(".py") else _import_module(path, place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [one for one, value in vars(module).items() if inspect.isfunction(value) and not one.startswith("_")]
        raise ScorerError(f"reward.scorer {path}: {place} has no function {name}; it has {', '.join(known) or 'none'}")
    _check_signature(path, function, arguments)
    return FunctionJudge(function, dict(arguments))


def _import_file(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ScorerError(
            f"reward.scorer {path}: {file} is no file (looked in {Path.cwd()}); write path/to/file.py:function"
        )
    name = f"tandem_scorer_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look a class's module up there
    sys.path.insert(0, str(file.parent.resolve()))  # as `python file.py` would, for imports of its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ScorerError(f"reward.scorer {path}: {file} does not import: {_one_line(error)}") from error
    return module


def _import_module(path: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise ScorerError(
                f"reward.scorer {path}: no module named {place} (working folder {Path.cwd()}); "
                "write an importable module:function or path/to/file.py:function"
            ) from error
        raise ScorerError(f"reward.scorer {path}: {place} does not import: {_one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise ScorerError(f"reward.scorer {path}: {place} does not import: {_one_line(error)}") from error


def _check_signature(path: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    given = {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": {}, **arguments}
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise ScorerError(
            f"reward.scorer {path}: {error}; it is called with data_source, solution_str, ground_truth, extra_info"
            + (f" and reward.arguments {', '.join(arguments)}" if arguments else "")
        ) from None
    except ValueError:
        return  # some builtins have no signature to look at


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_MAX_DETAIL]}"
