"""A rubric: scorers with weights, gates, routing and normalisation, written in TOML, and how it combines their scores.

Nothing here runs a scorer or reads a file. docs/reward.md explains the keys.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any

from annotated_types import Len
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError

from tandem.protos.contracts import Score, Scored, Unscored
from tandem.protos.error_text import did_you_mean, printable, shown
from tandem.protos.errors import ScorerError
from tandem.reward.config import RewardConfig
from tandem.reward.options.errors import explain
from tandem.reward.registry import RUBRIC, SCORERS, ScorerSpec, is_import_path, make_spec, unknown_scorer

MAX_TEXT_BYTES = 64 << 10
MAX_SCORERS = 256
"""Maximum number of scorers per item, including nested rubrics. Otherwise a short text could request millions."""
MAX_DEPTH = 16
"""Maximum nesting of rubrics."""

Range = tuple[float, float]

_NAME = re.compile(r"[._-]*[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The scorers that a rubric may name. `for_clients` refuses access to the service's machine and network."""

    declared: Mapping[str, ScorerSpec] = field(default_factory=dict)
    for_clients: bool = False

    @classmethod
    def of(cls, config: RewardConfig) -> Catalogue:
        """Builds a recipe's catalogue. Raises ScorerError for an unknown declared scorer or wrong arguments."""
        declared = {}
        for name, one in config.scorers.items():
            place = f"reward.scorers.{printable(name)}"
            if name in SCORERS or name == RUBRIC:
                raise ScorerError(f"{place}: the name is taken; give it another")
            if len(name) > 64 or not _NAME.fullmatch(name):
                raise ScorerError(f"{place}: the name should be up to 64 letters, digits, . _ -; give it another")
            declared[name] = make_spec(one.scorer, one.arguments, place)
        return cls(declared)

    def spec(self, scorer: str, arguments: Mapping[str, object], place: str) -> ScorerSpec:
        """The checked specification. Raises ScorerError for unknown names, wrong arguments, what clients may not."""
        if scorer in self.declared:
            if arguments:
                told = f"scorer {scorer} is declared with its arguments and takes no others"
                raise ScorerError(f"{place}.arguments: {told}")
            return self.declared[scorer]
        if self.for_clients:
            self._refuse_what_is_the_recipes(scorer, arguments, place)
        return make_spec(scorer, arguments, place, known=self.declared)

    def _refuse_what_is_the_recipes(self, scorer: str, arguments: Mapping[str, object], place: str) -> None:
        remedy = "the service's recipe can declare it under a name in reward.scorers"
        kind = SCORERS.get(scorer)
        if kind is None and is_import_path(scorer):
            raise ScorerError(f"{place}.scorer {scorer!r:.100}: a client's rubric cannot name an import path; {remedy}")
        if kind is None:
            names = [*self.declared, *(name for name in SCORERS if SCORERS[name].ISOLATION != "remote")]
            raise unknown_scorer(scorer, names, place)
        if kind.ISOLATION == "remote":
            told = "it names a folder or an address, which a client cannot"
            raise ScorerError(f"{place}.scorer {scorer}: {told}; {remedy}")
        if taken := [name for name in arguments if name in kind.RECIPE_ONLY]:
            raise ScorerError(f"{place}.arguments.{taken[0]}: a client cannot set it; {remedy}")


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a rubric. Its score is its source's score, mapped from range `scale[0]` to `scale[1]` and clipped."""

    name: str
    """Its key in the breakdown; "" for a single scorer, whose breakdown is kept unchanged."""
    source: ScorerSpec | Rubric
    weight: float = 1.0
    gate: bool = False
    pass_at: float = 1.0
    data_sources: tuple[str, ...] | None = None
    scale: tuple[Range, Range] | None = None
    clip: Range | None = None
    optional: bool = False

    def applies(self, data_source: str) -> bool:
        """Whether the component scores items of this data source."""
        return self.data_sources is None or any(fnmatchcase(data_source, one) for one in self.data_sources)

    @property
    def rising(self) -> bool:
        """Whether a higher score of its source raises the reward."""
        (low, high), (new_low, new_high) = self.scale or ((0.0, 1.0), (0.0, 1.0))
        return (self.weight < 0) == ((low < high) != (new_low < new_high))

    def normalised(self, value: float) -> float:
        """Maps the value to the component's scale."""
        if self.scale is not None:
            (low, high), (new_low, new_high) = self.scale
            share = (value - low) / (high - low)
            value = new_low * (1.0 - share) + new_high * share
        return _clipped(value, self.clip)


@dataclass(frozen=True, slots=True)
class Rubric:
    """Components in order, and the range that their weighted sum is clipped to."""

    components: tuple[Component, ...]
    clip: Range | None = None

    @classmethod
    def parse(cls, text: str, *, allowed: Catalogue) -> Rubric:
        """Parses TOML text. Raises ScorerError with the place and, if any, the nearest known name."""
        return _Parser(_read(text), allowed).rubric((), "")

    @classmethod
    def alone(cls, spec: ScorerSpec) -> Rubric:
        """A rubric of one scorer, whose scores stay unchanged."""
        return cls((Component("", spec),))

    def combine(self, scores: Sequence[Score | None], data_source: str = "") -> Score:
        """Σ weight · score of the components for this data source. The breakdown has every component's score.

        `scores` has one entry per component, None if it did not run. Components after a failed gate count as 0. An
        unscored component makes the whole item unscored with its reason, except that an optional one is left out. If no
        component is left, there is no reward.
        """
        terms: list[float] = []
        breakdown: dict[str, float] = {}
        left_out: Unscored | None = None
        closed = False  # by a failed gate
        for component, score in zip(self.components, scores, strict=True):
            if component.data_sources is not None and not component.applies(data_source):
                continue
            if closed:
                breakdown[component.name] = 0.0
                continue
            name = component.name
            if not isinstance(score, Scored):
                reason = score or Unscored("infrastructure", "it was not run")
                reason = Unscored(reason.reason, f"{name}: {reason.detail}") if name else reason
                if not component.optional:
                    return reason
                left_out = left_out or reason
                continue
            value = component.normalised(score.value)
            terms.append(component.weight * value)
            if name:
                breakdown[name] = value
                breakdown |= {f"{name}/{part}": number for part, number in score.breakdown.items()}
            else:
                breakdown |= score.breakdown
            closed = component.gate and value < component.pass_at
        if not terms:
            return left_out or Unscored("invalid_input", f"no component is for data_source {data_source!r:.80}")
        try:
            total = math.fsum(terms)  # exact, so the order of components does not matter
        except (OverflowError, ValueError):
            total = math.nan
        if not math.isfinite(total):
            return Unscored("invalid_input", "the sum of the components is not a finite number")
        return Scored(_clipped(total, self.clip), breakdown)

    def stages(self) -> list[list[int]]:
        """Returns the indices of the components that may run concurrently, by stage. A gate ends a stage."""
        stages: list[list[int]] = [[]]
        for number, component in enumerate(self.components):
            stages[-1].append(number)
            if component.gate:
                stages.append([])
        return [stage for stage in stages if stage]

    def specs(self) -> list[ScorerSpec]:
        """Every scorer of the rubric and of its nested rubrics."""
        return [spec for _, spec in self.named_specs()]

    def named_specs(self, within: str = "") -> Iterator[tuple[str, ScorerSpec]]:
        """Every scorer with its name in the breakdown; a single scorer with its own name."""
        for component in self.components:
            name = within + component.name
            if isinstance(component.source, Rubric):
                yield from component.source.named_specs(f"{name}/")
            else:
                yield name or component.source.scorer, component.source


def _clipped(value: float, clip: Range | None) -> float:
    return value if clip is None else min(max(value, clip[0]), clip[1])


def _ordered(ends: Range) -> Range:
    if ends[0] > ends[1]:
        raise ValueError("the lower end comes first")
    return ends


_Ends = Annotated[Range, Strict(False)]  # TOML has no tuples
_Clip = Annotated[_Ends, AfterValidator(_ordered)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _ComponentTable(_Table):
    name: str = ""
    scorer: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    weight: float = 1.0
    gate: bool = False
    pass_at: float | None = None
    data_sources: Annotated[tuple[str, ...], Strict(False)] | None = None
    from_: _Ends | None = Field(default=None, alias="from")
    to: _Ends | None = None
    clip: _Clip | None = None
    optional: bool = False


class _RubricTable(_Table):
    clip: _Clip | None = None
    components: Annotated[list[_ComponentTable], Len(1)]


class _File(_RubricTable):
    rubrics: dict[str, _RubricTable] = Field(default_factory=dict)


def _read(text: str) -> _File:
    if len(text) > MAX_TEXT_BYTES:
        raise ScorerError(f"the rubric has {len(text)} characters; at most {MAX_TEXT_BYTES} are read")
    try:
        return _File.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ScorerError(f"the rubric is not valid TOML: {str(error)[:300]}") from None
    except ValidationError as error:
        raise ScorerError(explain(_File, error)) from None


class _Parser:
    """Parses tables into rubrics, starting with the rubrics that components refer to."""

    def __init__(self, file: _File, allowed: Catalogue) -> None:
        self._file = file
        self._allowed = allowed
        self._made: dict[str, Rubric] = {}

    def rubric(self, path: tuple[str, ...], place: str) -> Rubric:
        """The rubric at a path of names. The empty path is the rubric of the file itself."""
        table = self._file.rubrics[path[-1]] if path else self._file
        components: dict[str, Component] = {}
        for number, one in enumerate(table.components):
            component = self._component(one, path, f"{place}components[{number}]")
            if component.name in components:
                taken = list(components).index(component.name)
                told = f"{component.name!r} is already the name of components[{taken}]; give each its own"
                raise ScorerError(f"{place}components[{number}].name: {told}")
            components[component.name] = component
        made = Rubric(tuple(components.values()), table.clip)
        if len(made.specs()) > MAX_SCORERS:
            raise ScorerError(f"{place}components: more than {MAX_SCORERS} scorers for one item")
        return made

    def _component(self, table: _ComponentTable, path: tuple[str, ...], place: str) -> Component:
        source = self._source(table, path, place)
        if table.gate and table.optional:
            raise ScorerError(f"{place}.optional: a gate cannot be left out")
        if table.pass_at is not None and not table.gate:
            raise ScorerError(f"{place}.pass_at: only a gate has one; add gate = true")
        if (table.from_ is None) != (table.to is None):
            raise ScorerError(f"{place}.{'to' if table.to is None else 'from'} is missing: from and to go together")
        component = Component(
            name=table.name or _default_name(table),
            source=source,
            weight=table.weight,
            gate=table.gate,
            pass_at=1.0 if table.pass_at is None else table.pass_at,
            data_sources=table.data_sources,
            scale=_scale(table, place),
            clip=table.clip,
            optional=table.optional,
        )
        if "/" in component.name or component.name in ("earned", "scorer") or len(component.name) > 64:
            told = "cannot be a name in the breakdown (no /, at most 64 characters, not earned, not scorer)"
            raise ScorerError(f"{place}.name: {component.name!r:.80} {told}")
        return component

    def _source(self, table: _ComponentTable, path: tuple[str, ...], place: str) -> ScorerSpec | Rubric:
        if table.scorer != RUBRIC:
            return self._allowed.spec(table.scorer, table.arguments, place)
        name = table.arguments.get("name")
        if not isinstance(name, str) or set(table.arguments) != {"name"}:
            told = "scorer rubric takes name, the name of a table in rubrics, and nothing else"
            raise ScorerError(f"{place}.arguments: {told}")
        if name not in self._file.rubrics:
            meant = did_you_mean(name, self._file.rubrics)
            raise ScorerError(f"{place}.arguments.name: there is no rubric {shown(name)}{meant}")
        if name in path:
            around = " → ".join(map(printable, [*path[path.index(name) :], name]))
            raise ScorerError(f"{place}.arguments.name: rubrics refer to one another in a circle: {around}")
        if len(path) >= MAX_DEPTH:
            raise ScorerError(f"{place}.arguments.name: rubrics may be nested at most {MAX_DEPTH} deep")
        if name not in self._made:
            self._made[name] = self.rubric((*path, name), f"rubrics.{printable(name)}.")
        return self._made[name]


def _default_name(table: _ComponentTable) -> str:
    if table.scorer == RUBRIC:
        return str(table.arguments.get("name", RUBRIC))
    return table.scorer.rpartition(":")[2] if is_import_path(table.scorer) else table.scorer


def _scale(table: _ComponentTable, place: str) -> tuple[Range, Range] | None:
    if table.from_ is None or table.to is None:
        return None
    low, high = table.from_
    if low == high or not math.isfinite(high - low):
        raise ScorerError(f"{place}.from: its ends must differ (got {[low, high]})")
    return table.from_, table.to
