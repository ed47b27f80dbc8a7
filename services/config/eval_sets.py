"""Configuration of evaluations: the sets of prompts, and when each is evaluated, sampled and scored how."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tandem.protos.error_text import did_you_mean
from tandem.protos.options import BareName, Options
from tandem.rollout.config import RolloutConfig
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.trainer.sample_metrics import metric_names

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$"
NO_ENVIRONMENT = "none"
"""Path of an evaluation set's environment whose samples are single answers."""


class EvalEnvironment(Options):
    """`environment` of an evaluation set: what its samples play instead of the recipe's environment."""

    path: str = ""
    """Class, as in `environment.path`, that gets only the arguments below; or `none`: no environment, single answers.
    Default: the recipe's class or tools, with its arguments and these over them.
    """
    arguments: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the class."""

    @field_validator("path")
    @classmethod
    def _names_a_class(cls, value: str) -> str:
        if value and value != NO_ENVIRONMENT and not all(value.rpartition(":")):
            raise ValueError("it names no class; write module.path:Class, path/to/file.py:Class, or none")
        return value

    @model_validator(mode="after")
    def _has_a_class_for_arguments(self) -> EvalEnvironment:
        if self.path == NO_ENVIRONMENT and self.arguments:
            raise ValueError("arguments: without an environment, nothing takes them; leave them out")
        return self

    def over(self, environment: EnvironmentConfig) -> EnvironmentConfig:
        """The recipe's environment with the class and arguments of the set. The limits stay. What differs from the
        recipe's runs beside the samplers, since environment services have the recipe's only.
        """
        if self.path == NO_ENVIRONMENT:
            return EnvironmentConfig()
        changes: dict[str, object] = {"arguments": {**environment.arguments, **self.arguments}}
        if self.path:
            changes = {"path": self.path, "arguments": self.arguments, "tools": ()}
        chosen = environment.model_copy(update=changes)
        return environment if chosen == environment else chosen.model_copy(update={"service": False})

    def key(self, environment: EnvironmentConfig) -> str:
        """Names what is played: "" for the recipe's environment, `none`, or class and arguments as JSON text."""
        chosen = self.over(environment)
        if chosen == environment:
            return ""
        named = chosen.model_dump(mode="json", include={"path", "arguments"})
        return json.dumps(named, sort_keys=True) if chosen.path else NO_ENVIRONMENT


class EvalSet(Options):
    """A set of prompts to evaluate on. It is evaluated at the first and the last version, and every so many batches."""

    name: Annotated[str, Field(pattern=_NAME)] = ""
    """Name in metrics (`eval/<name>/pass@1`) and of its file of generations; default: the name of its file without the
    ending.
    """
    file: str
    """Parquet or JSON lines in the columns of the training files."""
    every: Annotated[int, Field(ge=0)] = 0
    """Batches between two evaluations; 0: trainer.evaluate_every."""
    limit: Annotated[int, Field(ge=0)] = 0
    """Prompts of the file that are used, the first ones; 0: all."""
    scorer: str = ""
    """A built-in scorer that needs neither folder nor address, or one of `reward.scorers`; default: the recipe's scorer
    or rubric.
    """
    samples_per_prompt: Annotated[int, Field(ge=1, le=256)] = 1
    """n: answers to each prompt; with an environment, episodes."""
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    """Sampling temperature, 0 is greedy. Default: 0 for one answer to each prompt, rollout.temperature for several."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: only the most likely tokens whose probabilities add up to this."""
    max_response_tokens: Annotated[int, Field(ge=0)] = 0
    """Longest answer or episode, at most rollout.max_response_tokens; 0: as long as that."""
    environment: Annotated[EvalEnvironment, BeforeValidator(BareName("path", "", {}))] = EvalEnvironment()
    """What its samples play instead of the recipe's environment: `none`, a class, or a table."""

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, values: object) -> object:
        if isinstance(values, dict) and not values.get("name") and isinstance(values.get("file"), str):
            stem = re.sub(r"[^A-Za-z0-9._-]", "_", Path(values["file"]).stem).lstrip("-.")
            return {**values, "name": stem[:64] or "eval"}
        return values

    @property
    def rubric(self) -> str:
        """The rubric that is sent to the reward service, in TOML; "" for the recipe's."""
        return f"[[components]]\nscorer = {json.dumps(self.scorer)}\n" if self.scorer else ""

    def filled(self, every: int, rollout: RolloutConfig) -> Self:
        """The set with the values that its defaults stand for."""
        temperature = 0.0 if self.samples_per_prompt == 1 else rollout.temperature
        return self.model_copy(
            update={
                "every": self.every or every,
                "temperature": temperature if self.temperature is None else self.temperature,
                "max_response_tokens": self.max_response_tokens or rollout.max_response_tokens,
            }
        )


class EvalConfig(Options):
    """`[eval]`: evaluations of the policy during a run and by `tandem eval` (docs/evaluation.md)."""

    sets: tuple[EvalSet, ...] = ()
    """Sets of prompts besides `data.eval_file`, which is short for the first set with nothing but a file."""
    min_scored: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9
    """Share of a set's samples that must have a score. Below it the set's evaluation fails and gives no metrics."""
    keep_best: str = ""
    """Metric, e.g. `eval/test/pass@1`: of the trained versions that are evaluated, the one with its highest value is
    kept as a Hugging Face folder in `best/<version>`.
    """
    num_best: Annotated[int, Field(ge=1)] = 1
    """Number of versions that keep_best keeps, those with the highest values."""
    stop_at: float | None = None
    """The run ends early once the metric of keep_best has at least this value."""
    patience: Annotated[int, Field(ge=0)] = 0
    """The run ends early once so many evaluations in a row do not improve the metric of keep_best; 0: never."""

    @property
    def best_set(self) -> str:
        """The set whose metric is that of `keep_best`, "" for none."""
        return self.keep_best.split("/")[1] if self.keep_best else ""

    @model_validator(mode="after")
    def _has_a_metric(self) -> EvalConfig:
        if (self.patience or self.stop_at is not None or self.num_best > 1) and not self.keep_best:
            raise ValueError("stop_at, patience and num_best need a metric; set keep_best, e.g. to eval/test/pass@1")
        return self


def check_metric(metric: str, sets: Sequence[EvalSet]) -> None:
    """Checks that an evaluation gives the metric `eval/<set>/<metric>`. Raises ValueError with those that it gives."""
    known = [f"eval/{one.name}/{name}" for one in sets for name in metric_names(one.samples_per_prompt)]
    if metric and metric not in known:
        told = f"there is no metric {metric}{did_you_mean(metric, known)}"
        raise ValueError(f"eval.keep_best: {told}; there are {', '.join(known) or 'no evaluation sets'}")


def check_sets(sets: Sequence[EvalSet], max_response_tokens: int, environment: EnvironmentConfig, scorer: str) -> None:
    """Checks sets whose defaults are filled in, with the recipe's environment and scorer. Raises ValueError with the
    place of the first fault. With an environment, greedy samples of a prompt differ, because each meets another seed.
    """
    names = Counter(one.name for one in sets)
    for one in sets:
        place = f"evaluation set {one.name}"
        if names[one.name] > 1:
            raise ValueError(f"{names[one.name]} evaluation sets have the name {one.name}; give each its own `name`")
        _check_environment(one, environment, scorer)
        plays = bool(one.environment.over(environment).path)
        if one.temperature == 0.0 and one.samples_per_prompt > 1 and not plays:
            told = f"samples_per_prompt {one.samples_per_prompt} with temperature 0 samples the same answer each time"
            raise ValueError(f"{place}: {told}; set a temperature")
        if one.max_response_tokens > max_response_tokens:
            told = f"max_response_tokens {one.max_response_tokens} is more than the samplers allow"
            raise ValueError(f"{place}: {told} (rollout.max_response_tokens {max_response_tokens}); lower it")


def _check_environment(one: EvalSet, environment: EnvironmentConfig, scorer: str) -> None:
    if one.environment == EvalEnvironment():
        return
    place, plays_none = f"evaluation set {one.name}: environment", one.environment.path == NO_ENVIRONMENT
    if not environment.path:
        raise ValueError(f"{place}: the recipe has no environment; set environment.path, or leave it out of the set")
    if plays_none and (one.scorer or scorer) == "earned":
        raise ValueError(f"{place}: the scorer earned gives single answers nothing; set a `scorer` of the set")
