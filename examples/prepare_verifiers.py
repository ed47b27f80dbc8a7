"""Writes the data set of an environment of verifiers as a dataset file for Tandem, with any version of verifiers:

    python examples/prepare_verifiers.py verifiers:load_environment '{"env_id": "wordle"}' wordle.jsonl

It needs verifiers and the environment, and nothing of Tandem. The first two arguments are `environment.path` and
`environment.arguments` of the recipe.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

MOST_ROWS = 100_000  # some sets of tasks have no end
UNKNOWN = "(the environment knows)"


def main(path: str, arguments: str, output: Path) -> int:
    """Writes the file; returns the exit code."""
    environment = load(path, json.loads(arguments))
    if hasattr(environment, "taskset"):
        rows: Iterable[Mapping[str, Any]] = (of_task(task.data.model_dump(mode="json")) for task in environment.taskset)
    else:
        rows = (of_row(row) for row in environment.get_dataset())
    number = 0
    with output.open("w", encoding="utf-8") as file:
        for row in islice(rows, MOST_ROWS):
            file.write(json.dumps(row) + "\n")
            number += 1
    print(f"{output}: {number} rows")
    return 0


def load(path: str, arguments: dict[str, Any]) -> Any:
    """The environment that the recipe's class or function makes."""
    place, _, name = path.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(place).resolve().parent))
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    make: Callable[..., Any] = getattr(module, name)
    if make.__module__ != "verifiers.v1.utils.loaders":
        return make(**arguments)
    arguments.pop("renderer", None)  # it is the adapter's
    return make(importlib.import_module(make.__module__).resolve_env_config(arguments))


def of_row(columns: Mapping[str, Any]) -> dict[str, Any]:
    """A row of verifiers up to 0.3."""
    messages = [{key: value for key, value in one.items() if value is not None} for one in columns["prompt"]]
    others = {name: value for name, value in columns.items() if name != "prompt"}
    return {"prompt": messages, "ground_truth": columns.get("answer") or UNKNOWN, "extra_info": others}


def of_task(columns: Mapping[str, Any]) -> dict[str, Any]:
    """A task of verifiers since 0.4. The prompt only tells how long it is: the environment renders its own."""
    prompt, system = columns.get("prompt") or UNKNOWN, columns.get("system_prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    first = [{"role": "system", "content": system}] if system else []
    return {"prompt": first + messages, "ground_truth": columns.get("answer") or UNKNOWN, "extra_info": dict(columns)}


if __name__ == "__main__":
    if len(sys.argv) != 4:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
