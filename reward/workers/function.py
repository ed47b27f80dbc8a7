"""A Python function as scorer, by import path, with the parameters of verl's `compute_score`, or the plural ones of its
batch reward manager (`data_sources`, …) to judge several answers at once. Both kinds may be coroutine functions.

They run in worker processes (`tandem.reward.workers.pool`), because user's code may hang, crash, print or leak.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.text.values import finite

MAX_COMPONENTS = 100
"""Maximum number of numbers in the dict that a function returns."""
_MAX_DETAIL = 300
_VERSION_CHARACTERS = 12
_LOOP = asyncio.Runner()  # one for all calls, because objects that a user's module keeps open belong to a loop
_SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
_BATCH = tuple(f"{name}s" for name in _SINGLE)


@dataclass(frozen=True)
class _UserFunction:
    function: Callable[..., Any]
    arguments: Mapping[str, object] = field(default_factory=dict)


class FunctionJudge(_UserFunction):
    """Calls the function and converts its result or exception into a `Score`."""

    def judge(self, item: ScoreItem) -> Score:
        """The score of an item. Raises only MemoryError, which the worker process handles."""
        try:
            result = _finished(self.function(**_verl_arguments(item), **self.arguments))
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            return failure(error)
        return to_score(result)


@dataclass(frozen=True)
class CoroutineJudge(_UserFunction):
    """Awaits the function for all items concurrently, because such functions usually wait for the network."""

    seconds: float | None = None
    """Of one item. Past it, only this item is unscored (`timeout`)."""

    def judge_batch(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One result an item. Raises only MemoryError."""
        return _LOOP.run(self._judge_all(items))

    async def _judge_all(self, items: Sequence[ScoreItem]) -> list[Score]:
        return list(await asyncio.gather(*map(self._judge, items)))

    async def _judge(self, item: ScoreItem) -> Score:
        call = self.function(**_verl_arguments(item), **self.arguments)
        ours = asyncio.timeout(self.seconds)
        try:
            async with ours:
                result = await call
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            return Unscored("timeout", f"no answer within {self.seconds:g} s") if ours.expired() else failure(error)
        return to_score(result)


class BatchFunctionJudge(_UserFunction):
    """Calls the function with all items. If it raises, smaller and smaller batches isolate the faulty item."""

    def judge_batch(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One result an item. Raises only MemoryError."""
        if not items:
            return []
        given = [_verl_arguments(item) for item in items]
        columns = {f"{name}s": [one[name] for one in given] for name in _SINGLE}
        try:
            results = list(_finished(self.function(**columns, **self.arguments)))
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            if len(items) == 1:
                return [failure(error)]
            middle = len(items) // 2
            return self.judge_batch(items[:middle]) + self.judge_batch(items[middle:])
        if len(results) != len(items):
            detail = f"the function returned {len(results)} results for {len(items)} answers"
            return [Unscored("crashed", detail)] * len(items)
        return [to_score(result) for result in results]


def _verl_arguments(item: ScoreItem) -> dict[str, Any]:
    texts = {"data_source": item.data_source, "solution_str": item.solution}
    return {**texts, "ground_truth": item.ground_truth, "extra_info": dict(item.extra_info)}


def _finished(result: Any) -> Any:
    return _LOOP.run(result) if inspect.iscoroutine(result) else result


def failure(error: BaseException) -> Unscored:
    """Returns the reason for an exception of the function: the process limit that it hit, otherwise `crashed`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    message = clean(f"{type(error).__name__}: {_text(error)}"[:_MAX_DETAIL] + place)
    is_limit = isinstance(error, OSError) and error.errno == errno.EMFILE
    return Unscored("limit" if is_limit else "crashed", message)


def to_score(result: object) -> Score:
    """Converts a number, a bool, or a dict with `score` and other components to a `Score`. Numeric components become
    the breakdown. Other results, NaN and infinities are unscored (`invalid_input`).
    """
    components: Mapping[str, object] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            keys = f"{list(result)!r:.100}"
            return Unscored("invalid_input", clean(f"the function returned a dict without `score`: keys {keys}"))
        components, result = result, result["score"]
    value = _number_of(result)
    if value is None:
        what = f"{result}" if isinstance(result, float) else f"{type(result).__name__} {_shown(result)}"
        return Unscored("invalid_input", clean(f"the function returned {what}, not a finite number"))
    if not components:
        return Scored(value)
    numbers = {clean(str(name)): _number_of(part) for name, part in components.items() if name != "score"}
    breakdown = {name: number for name, number in numbers.items() if number is not None}
    if len(breakdown) > MAX_COMPONENTS:
        return Unscored("invalid_input", f"the function returned {len(breakdown)} components, above {MAX_COMPONENTS}")
    return Scored(value, breakdown)


def _number_of(value: object) -> float | None:
    read_scalar = getattr(value, "item", None)  # scalars of numpy and torch, without importing either
    if callable(read_scalar):
        try:
            value = read_scalar()
        except (TypeError, ValueError, RuntimeError):
            return None  # an array of several numbers
    return finite(value)


def clean(text: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode() if not text.isascii() else text


def load_function(path: str, arguments: Mapping[str, object]) -> FunctionJudge | CoroutineJudge | BatchFunctionJudge:
    """Loads the function at `module.path:function` or `file.py:function` and checks its signature against verl's calls.
    Raises ScorerError if the file does not import, or the function is missing or does not accept the arguments.
    """
    place, _, name = path.rpartition(":")
    module = _import_file(path, Path(place)) if place.endswith(".py") else _import_module(path, place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [one for one, value in vars(module).items() if inspect.isfunction(value) and not one.startswith("_")]
        raise ScorerError(f"{path}: {place} has no function {name}; it has {', '.join(known) or 'none'}")
    if _takes(path, function, arguments):
        return BatchFunctionJudge(function, dict(arguments))
    if inspect.iscoroutinefunction(function):
        return CoroutineJudge(function, dict(arguments))
    return FunctionJudge(function, dict(arguments))


def source_file(path: str) -> Path | None:
    """The file of a function's module; None if it cannot be found. Imports nothing."""
    place = path.rpartition(":")[0]
    return Path(place) if place.endswith(".py") else _file_of(place)


def source_version(path: str) -> str:
    """The version of a function: the beginning of the SHA-256 of its file alone; "" without a file."""
    file = source_file(path)
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:_VERSION_CHARACTERS] if file is not None else ""
    except OSError:
        return ""  # loading the function reports the cause


def _file_of(module: str) -> Path | None:
    packages = [root.joinpath(*module.split(".")) for root in (Path.cwd(), *map(Path, sys.path))]
    files = (file for one in packages for file in (one / "__init__.py", one.with_name(f"{one.name}.py")))
    return next(filter(Path.is_file, files), None)


def _import_file(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ScorerError(f"{path}: {file} is no file (looked in {Path.cwd()}); write path/to/file.py:function")
    name = f"tandem_scorer_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look up a class's module there
    sys.path.insert(0, str(file.parent.resolve()))  # as `python file.py` does, for imports from its folder
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _import_error(path, str(file), error) from error
    return module


def _import_module(path: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            raise ScorerError(
                f"{path}: no module named {place} (working folder {Path.cwd()}); "
                "write an importable module:function or path/to/file.py:function"
            ) from error
        raise _import_error(path, place, error) from error


def _import_error(path: str, place: str, error: BaseException) -> ScorerError:
    told = clean(f"{type(error).__name__}: {' '.join(_text(error).split())[:_MAX_DETAIL]}")
    return ScorerError(f"{path}: {place} does not import: {told}")


def _takes(path: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Whether the function judges batches. Raises ScorerError if it supports neither kind of call."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return False  # some builtins have no signature
    batch = set(_BATCH[:2]) <= set(signature.parameters)
    names = _BATCH if batch else _SINGLE
    try:
        signature.bind(**{**dict.fromkeys(names), **arguments})
    except TypeError as error:
        more = f" and arguments {', '.join(arguments)}" if arguments else ""
        raise ScorerError(f"{path}: {error}; it is called with {', '.join(names)}{more}") from None
    return batch


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the user's own exception class
        return "(without a message)"


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}"
    except Exception:  # the user's own class
        return ""
