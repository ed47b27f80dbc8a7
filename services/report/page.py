"""The report as one HTML file that needs no network: charts, timeline, samples, configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources
from jinja2 import Environment, StrictUndefined

from tandem.services.config import without_secrets
from tandem.services.config.docs import as_toml
from tandem.services.report import charts
from tandem.services.report.curves import COLORS, curves
from tandem.services.report.run_data import RunData

_FIGURES = {
    "initial_accuracy": ("accuracy before", "{:.1%}"),
    "final_accuracy": ("accuracy after", "{:.1%}"),
    "train_steps": ("batches trained", "{:,}"),
    "wall_seconds": ("duration", "{:,.0f} s"),
    "trainer_tokens_per_second": ("trainer tokens/s", "{:,.0f}"),
    "sampler_tokens_per_second": ("sampler tokens/s", "{:,.0f}"),
    "trainer_idle_fraction": ("trainer idle", "{:.0%}"),
    "sampler_idle_fraction": ("samplers idle", "{:.0%}"),
    "mean_staleness": ("mean staleness", "{:.2f}"),
    "observed_max_staleness": ("highest staleness", "{}"),
    "weight_updates": ("weight updates", "{:,}"),
    "weight_stall_seconds_mean": ("stall per update", "{:.3f} s"),
}
"""Figures of summary.json at the top of the report: label and format."""


def report_html(run: RunData, other: RunData | None = None) -> str:
    """The report of a run, compared with another one if there is one."""
    if other is not None and other.name == run.name:
        apart = run.folder.name != other.folder.name
        run, other = (replace(one, name=one.folder.name if apart else str(one.folder)) for one in (run, other))
    runs = [run] if other is None else [run, other]
    drawn = dict(curves(runs))
    timelines = {one.name if other else "": dict(charts.timeline(one)) for one in runs}
    figures = {f"curve {title}": chart for title, chart in drawn.items()}
    figures |= {f"time {name} {title}": chart for name, rows in timelines.items() for title, chart in rows.items()}
    figures |= {f"part {title}": chart for title, chart in charts.distributions(runs)}
    script, divs = components(figures) if figures else ("", {})
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        runs=runs,
        colors=COLORS,
        figures=list(_figures(runs)),
        curves={title: divs[f"curve {title}"] for title in drawn},
        timelines={name: {title: divs[f"time {name} {title}"] for title in rows} for name, rows in timelines.items()},
        parts={name.removeprefix("part "): div for name, div in divs.items() if name.startswith("part ")},
        samples=list(run.samples()),
        evaluated=list(run.evaluated_samples()),
        configurations=[as_toml(without_secrets(one.recipe)) for one in runs],
        differences=list(_differences(run, other)) if other else [],
        script=script,
        library=Resources(mode="inline", components=["bokeh"]).render(),
    )


def _figures(runs: Sequence[RunData]) -> Iterator[tuple[str, list[str]]]:
    for name, (label, form) in _FIGURES.items():
        values = [run.summary.get(name) for run in runs]
        if any(value is not None for value in values):
            yield label, ["–" if value is None else form.format(value) for value in values]


def _differences(run: RunData, other: RunData) -> Iterator[tuple[str, object, object]]:
    """Keys whose values differ, with both values."""
    mine, its = (dict(_flat(without_secrets(one.recipe).model_dump(mode="json"))) for one in (run, other))
    for key in sorted(mine.keys() | its.keys()):
        if mine.get(key) != its.get(key):
            yield key, mine.get(key, "–"), its.get(key, "–")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
