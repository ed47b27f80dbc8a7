"""The best versions of a run by a metric of its evaluations, and whether the run has trained long enough."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tandem.services.config.eval_sets import EvalConfig
from tandem.services.run.json_files import Line
from tandem.trainer.checkpoints.durable import remove_folder

BEST_FOLDER = "best"


def evaluation_figures(line: Line) -> dict[str, float]:
    """The figures of a line of evaluations.jsonl: `eval/<set>/<metric>`, and `eval/<set>/<data_source>/<metric>` for a
    set with several sources.
    """
    figures: dict[str, float] = {}
    for name, one in line.get("sets", {}).items():
        counts = {key: one[key] for key in ("num_scored", "num_truncated", "num_no_answer")} | one.get("episodes", {})
        figures |= {f"eval/{name}/{key}": value for key, value in {**counts, **one["metrics"]}.items()}
        if len(one["data_sources"]) > 1:
            for source, metrics in one["data_sources"].items():
                figures |= {f"eval/{name}/{source or 'no_source'}/{key}": value for key, value in metrics.items()}
    return figures


def values_by_version(evaluations: Iterable[Line], metric: str) -> dict[int, float]:
    """The metric of every trained version that has it, in the order of the versions."""
    figures = ((int(line["version"]), evaluation_figures(line)) for line in evaluations)
    found = {version: values[metric] for version, values in figures if metric in values}
    return {version: found[version] for version in sorted(found) if version > 0}


def keep_best(folder: Path, evaluations: Iterable[Line], metric: str, num_best: int) -> None:
    """Removes all exports in the run folder's `best/` but those with the highest values. Versions without an export do
    not count: a resumed run may have got another metric. Raises OSError.
    """
    exported = {int(export.name) for export in (folder / BEST_FOLDER).glob("[0-9]*") if export.name.isdigit()}
    values = {one: value for one, value in values_by_version(evaluations, metric).items() if one in exported}
    remove_others(folder, best_versions(values, num_best))


def best_versions(values: Mapping[int, float], num_best: int) -> list[int]:
    """The versions with the highest values, the best one first, of equal ones the earlier one."""
    return sorted(values, key=lambda version: (-values[version], version))[:num_best]


def reason_to_stop(evaluations: Iterable[Line], config: EvalConfig) -> str:
    """Why the run should have ended at one of its evaluations, by `stop_at` and `patience`; "" if it should go on."""
    best, since = -math.inf, 0
    for version, value in values_by_version(evaluations, config.keep_best).items():
        best, since = (value, 0) if value > best else (best, since + 1)
        if config.stop_at is not None and value >= config.stop_at:
            return f"{config.keep_best} is {value:.4f} at version {version} (eval.stop_at = {config.stop_at:g})"
        if config.patience and since >= config.patience:
            told = f"{since} evaluations up to version {version} have no better {config.keep_best} than {best:.4f}"
            return f"{told} (eval.patience = {config.patience})"
    return ""


def remove_others(folder: Path, best: Collection[int]) -> None:
    """Removes the exports of all versions but the best ones from the run folder. Raises OSError."""
    for export in sorted((folder / BEST_FOLDER).glob("[0-9]*")):
        version = export.name.partition("-")[0]  # adapters have a folder of their own
        if version.isdigit() and int(version) not in best and "." not in export.name:
            remove_folder(export)
