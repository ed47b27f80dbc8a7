"""The files that a run was given (data, models, scorers): their lengths and SHA-256, so that a run that goes on, a
service that joins it and a replay do not use others under the same name. Models of a hub are not compared.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from tandem.protos.errors import ConfigError
from tandem.reward.registry import is_import_path
from tandem.reward.workers.function import source_file
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.run.folder import write_text

INPUTS_FILE = "inputs.json"
_MODEL_FILES = frozenset({".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"})
_OF_SERVICE = {
    "feed": ("data.train", "model.chat_template"),
    "trainer": ("data.eval_file", "eval.", "model.path", "trainer."),
    "rollout": ("model.path",),
    "environments": (),
    "reward": ("reward.",),
}
"""Beginnings of the keys whose files a service reads."""
_SHOWN_DIGITS = 16


class FileDigest(NamedTuple):
    """One file."""

    num_bytes: int
    sha256: str
    mtime_ns: int = 0

    def __str__(self) -> str:
        return f"{self.num_bytes:,} bytes with SHA-256 {self.sha256[:_SHOWN_DIGITS]}…"


class Input(NamedTuple):
    """What a key of the recipe names: a file, or a model's folder with its files by name. A file's own name is ""."""

    path: str
    files: Mapping[str, FileDigest]

    def to_json(self) -> dict[str, object]:
        return {"path": self.path, "files": {name: file._asdict() for name, file in self.files.items()}}

    @classmethod
    def from_json(cls, path: str, files: Mapping[str, Mapping[str, object]]) -> Self:
        read = {name: FileDigest._make(file[field] for field in FileDigest._fields) for name, file in files.items()}
        return cls(path, read)


def record_inputs(recipe: Recipe, buffer: Buffer) -> None:
    """Notes the inputs in the run's folder and in Redis. A file whose size and time of modification are those in the
    folder's record is not read again. Raises EnvironmentLackError if the folder cannot be written.
    """
    found = _digests(input_paths(recipe), recorded_inputs(recipe.folder))
    _write(recipe.folder, found)
    for key, one in found.items():
        _put(buffer, key, one, replace=True)


def check_inputs(recipe: Recipe, free: frozenset[str]) -> None:
    """Checks the inputs against the record in the run's folder, if there is one. Raises ConfigError with both values.

    Another path under one of the `free` keys or sections is a change that the user makes, and is not compared.
    """
    recorded = recorded_inputs(recipe.folder)
    if recorded:
        for key, now in _digests(input_paths(recipe), recorded).items():
            _compare(key, recorded.get(key), now, free, f"in the run of {recipe.folder}")


def check_training_data(recipe: Recipe) -> None:
    """Checks the training data alone, as `check_inputs` does. Raises ConfigError."""
    recorded = recorded_inputs(recipe.folder)
    read = {key: path for key, path in input_paths(recipe).items() if key.startswith("data.train")}
    for key, now in _digests(read, recorded).items() if recorded else ():
        _compare(key, recorded.get(key), now, frozenset(), f"in the run of {recipe.folder}")


def check_replayed_model(recipe: Recipe, folder: Path) -> None:
    """Checks the models of a replay, reading all their files. Raises ConfigError."""
    recorded = recorded_inputs(folder)
    read = {key: path for key, path in input_paths(recipe).items() if key.startswith(("model.path", "trainer."))}
    for key, now in _digests(read, {}).items() if recorded else ():
        _compare(key, recorded.get(key), now, frozenset(), f"in the run of {folder}")


def join_inputs(buffer: Buffer, recipe: Recipe, service: str, free: frozenset[str]) -> None:
    """Checks the inputs of a service that joins a run against those in Redis. The first service with an input notes it
    there; feed and trainer copy all that is noted into the run's folder. Raises ConfigError with both values,
    UnavailableError if Redis is unreachable, EnvironmentLackError if the folder cannot be written.
    """
    read = {key: path for key, path in input_paths(recipe).items() if key.startswith(_OF_SERVICE[service])}
    for key, now in _digests(read, recorded_inputs(recipe.folder)).items():
        before = _put(buffer, key, now, replace=False)
        _compare(key, before, now, free, f"in run {recipe.run.run_id} at {buffer.place}")
        if before.path != now.path:
            _put(buffer, key, now, replace=True)
    if service in ("feed", "trainer"):  # the others may not be able to write there
        noted = buffer.connection.hash("inputs")
        _write(
            recipe.folder, {key.decode(): Input.from_json(**json.loads(text)) for key, text in sorted(noted.items())}
        )


def model_digest(path: str) -> str:
    """Names the contents of a model's folder by a digest. Models of a hub are not compared: it is their name."""
    if not Path(path).is_dir():
        return path
    files = _digests({"model.path": Path(path)}, {})["model.path"].files
    return hashlib.sha256(json.dumps({name: file.sha256 for name, file in files.items()}).encode()).hexdigest()


def input_paths(recipe: Recipe) -> dict[str, Path]:
    """The local files and model folders that the recipe names, by key."""
    data, model = recipe.data, recipe.model
    named = {f"data.train[{number}].path": one.path for number, one in enumerate(data.train)}
    named |= {"data.train_file": data.train_file, "data.eval_file": data.eval_file, "model.path": model.path}
    named |= {f"eval.sets[{number}].file": one.file for number, one in enumerate(recipe.eval.sets)}
    named |= {"model.chat_template": model.chat_template, "reward.rubric": recipe.reward.rubric}
    if recipe.trainer.needs_critic:
        named["trainer.critic.path"] = recipe.trainer.critic.path
    named |= _scorer_files(recipe.reward.model_dump(), "reward")
    if recipe.reward.rubric:
        with suppress(OSError, ValueError):  # not on this machine, or unusable, which building the scorer reports
            rubric = tomllib.loads(Path(recipe.reward.rubric).read_text(encoding="utf-8"))
            named |= _scorer_files(rubric, "reward.rubric")
    return {key: Path(path) for key, path in named.items() if path and Path(path).exists()}


def recorded_inputs(folder: Path) -> dict[str, Input]:
    """The inputs in the record of a run; none without one."""
    file = folder / INPUTS_FILE
    if not file.is_file():
        return {}
    return {key: Input.from_json(**one) for key, one in json.loads(file.read_text(encoding="utf-8")).items()}


def _write(folder: Path, inputs: Mapping[str, Input]) -> None:
    write_text(folder / INPUTS_FILE, json.dumps({key: one.to_json() for key, one in inputs.items()}, indent=2) + "\n")


def _scorer_files(value: object, place: str) -> dict[str, str]:
    """The files of functions and the folders of reward models, at any depth."""
    if isinstance(value, dict):
        found: dict[str, str] = {}
        for name, inner in value.items():
            key = f"{place}.{name}"
            if name == "scorer" and isinstance(inner, str) and is_import_path(inner):
                found[key] = str(source_file(inner) or "")
            elif name == "path" and isinstance(inner, str):
                found[key] = inner
            else:
                found |= _scorer_files(inner, key)
        return found
    if isinstance(value, list | tuple):
        return {key: path for n, one in enumerate(value) for key, path in _scorer_files(one, f"{place}[{n}]").items()}
    return {}


def _digests(paths: Mapping[str, Path], known: Mapping[str, Input]) -> dict[str, Input]:
    with ThreadPoolExecutor(thread_name_prefix="digest") as threads:
        wanted = {
            key: {
                name: threads.submit(_digest, file, _known_file(known.get(key), path, name))
                for name, file in _files_of(path)
            }
            for key, path in paths.items()
        }
        return {
            key: Input(str(paths[key]), {name: file.result() for name, file in files.items()})
            for key, files in wanted.items()
        }


def _files_of(path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield "", path
        return
    for file in sorted(path.iterdir()):
        if file.suffix in _MODEL_FILES and file.is_file():
            yield file.name, file


def _known_file(known: Input | None, path: Path, name: str) -> FileDigest | None:
    return known.files.get(name) if known is not None and known.path == str(path) else None


def _digest(file: Path, known: FileDigest | None) -> FileDigest:
    status = file.stat()
    if known is not None and (known.num_bytes, known.mtime_ns) == (status.st_size, status.st_mtime_ns):
        return known
    with file.open("rb") as opened:
        return FileDigest(status.st_size, hashlib.file_digest(opened, "sha256").hexdigest(), status.st_mtime_ns)


def _put(buffer: Buffer, key: str, one: Input, *, replace: bool) -> Input:
    """Notes an input in Redis, unless one is noted and it is not to be replaced. Returns what is noted."""
    redis, place, text = buffer.connection.redis, buffer.connection.key("inputs"), json.dumps(one.to_json())
    if replace:
        buffer.connection.retried(lambda: redis.hset(place, key, text))
    else:
        buffer.connection.retried(lambda: redis.hsetnx(place, key, text))
    return Input.from_json(**json.loads(buffer.connection.hash("inputs")[key.encode()]))


def _compare(key: str, was: Input | None, now: Input, free: frozenset[str], where: str) -> None:
    is_free = key in free or key.partition(".")[0] in free
    if was is None or (is_free and was.path != now.path):
        return
    for name in sorted({**was.files, **now.files}):
        before, given = was.files.get(name), now.files.get(name)
        if before is not None and given is not None and before[:2] == given[:2]:
            continue
        remedy = f"give the changed one another name and set {key} to it" if is_free else "start a new run"
        raise ConfigError(
            f"{key}: {Path(now.path, name)} was {before or 'not there'} {where}, and is {given or 'missing'} here; put "
            f"back what the run began with, or {remedy}"
        )
