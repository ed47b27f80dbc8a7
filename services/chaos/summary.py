"""What `tandem chaos` prints and writes at its end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.services.chaos.injector import Made, Result
from tandem.services.chaos.schedule import Kind


@dataclass(frozen=True, slots=True)
class Recovery:
    """How fast one target recovered from one kind of fault."""

    kind: Kind
    target: str
    faults: int
    median_seconds: float | None
    """None: the run ended before it could recover."""
    worst_seconds: float | None


def recoveries(made: Sequence[Made]) -> list[Recovery]:
    """Ordered by kind and target."""
    found: dict[tuple[Kind, str], list[Made]] = {}
    for one in made:
        found.setdefault((one.fault.kind, one.fault.target), []).append(one)
    rows = []
    for (kind, target), faults in sorted(found.items()):
        seconds = [one.recovery_seconds for one in faults if one.recovery_seconds is not None]
        median, worst = (statistics.median(seconds), max(seconds)) if seconds else (None, None)
        rows.append(Recovery(kind, target, len(faults), _rounded(median), _rounded(worst)))
    return rows


def as_json(result: Result, wanted: int) -> dict[str, object]:
    """The result as a JSON value."""
    return {
        "exit_code": result.exit_code,
        "interrupted": result.interrupted,
        "faults_wanted": wanted,
        "faults_made": len(result.made),
        "checks": result.num_checks,
        "violations": result.violations,
        "seconds": round(result.seconds, 1),
        "groups": dict(result.groups),
        "recovery": [
            {name: getattr(row, name) for name in Recovery.__dataclass_fields__} for row in recoveries(result.made)
        ],
        "faults": [_fault_as_json(made) for made in result.made],
    }


def _fault_as_json(made: Made) -> dict[str, object]:
    fault = made.fault
    return {
        "number": fault.number,
        "kind": fault.kind,
        "target": fault.target,
        "note": made.effect.note.strip(" ()"),
        "seconds": fault.seconds,
        "at_seconds": round(made.began_at, 1),
        "at_version": made.published,
        "resumed": made.resumed,
        "exit_code": made.exit_code,
        "recovery_seconds": _rounded(made.recovery_seconds),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
