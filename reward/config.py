"""Configuration of the reward service."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from tandem.protos.options import Options


class DeclaredScorer(Options):
    """A scorer that a recipe declares under its own name. It may use what clients cannot: paths, addresses, keys."""

    scorer: str
    """A built-in scorer, or `module.path:function` / `file.py:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the scorer."""


class LimitsConfig(Options):
    """Resource limits for scoring one answer in a worker process; beyond them it has no score (`limit`), or the worst
    one if it is at fault (docs/reward.md).
    """

    memory_bytes: Annotated[int, Field(ge=64 << 20)] = 4 << 30
    """Private memory of a worker process, and of each process that it starts."""
    cpu_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """Processor time of one answer over all threads; 0 means reward.timeout_seconds."""
    processes: Annotated[int, Field(ge=0)] = 32
    """Processes that a scorer may run at a time."""
    open_files: Annotated[int, Field(ge=16)] = 256
    """Files that a worker process may have open."""
    output_bytes: Annotated[int, Field(ge=0)] = 1 << 20
    """Output that a scorer may print while it scores one answer."""


class RewardConfig(Options):
    """`[reward]`: which scorer scores the answers, and what happens when it cannot."""

    scorer: str = "exact"
    """A built-in scorer (see docs/reward.md), one of `scorers`, or `module.path:function` / `file.py:function` with
    verl's `compute_score` signature.
    """
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the scorer, e.g. `{tolerance = 1e-6}` or `{pattern = '#### (-?\\d+)'}`."""
    rubric: str = ""
    """TOML file that combines several scorers, in place of `scorer` and `arguments`."""
    scorers: dict[str, DeclaredScorer] = Field(default_factory=dict)
    """Scorers that rubrics may use by name, each with `scorer` and `arguments`. A client of the service may use these
    and the built-in scorers that need neither folder nor address. It cannot name an import path, file or folder itself.
    """
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Number of worker processes."""
    timeout_seconds: Annotated[float, Field(gt=0.0)] = 10.0
    """Longest time for one answer in a worker; after it the answer has no score (`timeout`), or the worst one if it is
    at fault (docs/reward.md).
    """
    limits: LimitsConfig = LimitsConfig()
    """Further limits for one answer in a worker."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that functions in workers see besides the usual ones, such as `PATH` and `HF_HOME`
    (docs/security.md), e.g. the key of an API that they call.
    """
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts to score a group with rows whose scorer hung or crashed; after that the rows keep their reason."""
    infrastructure_attempts: Annotated[int, Field(ge=1)] = 10
    """Attempts to score a group's rows, or a job's items, whose scorer cannot be reached, with pauses that grow from
    0.5 s to 30 s; after that they keep their reason.
    """
    min_scored_samples: Annotated[int, Field(ge=0)] = 0
    """Scored rows that a group needs to be trained when the attempts are used up; 0 means all. A greedy baseline answer
    does not count here; if there is one, it must always be scored.
    """
    lease_seconds: Annotated[float, Field(gt=0.0)] = 60.0
    """Time for which a claimed group stays leased to this service without a renewal."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """gRPC port; 0 picks a free one."""

    @model_validator(mode="after")
    def _one_source_of_rewards(self) -> RewardConfig:
        if self.rubric and (self.scorer != "exact" or self.arguments):
            raise ValueError("rubric and scorer cannot both be set: name the scorer in the rubric's components")
        return self

    def key_variables(self) -> frozenset[str]:
        """The environment variables with the keys of judges and remote scorers. Reads the rubric's file."""
        rubric = tomllib.loads(Path(self.rubric).read_text(encoding="utf-8")) if self.rubric else {}
        return frozenset(_values_of("api_key_env", [self.model_dump(), rubric]))

    @property
    def cpu_seconds(self) -> float:
        """Processor time of one answer."""
        return self.limits.cpu_seconds or self.timeout_seconds


def _values_of(key: str, value: object) -> Iterator[str]:
    """The texts under this key at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key and isinstance(inner, str) and inner:
                yield inner
            yield from _values_of(key, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _values_of(key, inner)
