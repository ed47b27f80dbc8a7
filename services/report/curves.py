"""The curves of runs over their batches, as Bokeh figures: for the report of one or two runs and for the dashboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from bokeh.models import ColumnDataSource, HoverTool
from bokeh.plotting import figure

from tandem.services.run.progress import Line


class RunFigures(Protocol):
    """A run as curves see it: the lines of metrics.jsonl, and its evaluations by version."""

    @property
    def name(self) -> str: ...
    @property
    def lines(self) -> Sequence[Line]: ...
    @property
    def evaluations(self) -> Sequence[Line]: ...


COLORS = "#2563eb", "#ea580c", "#16a34a", "#9333ea", "#0891b2", "#db2777", "#ca8a04", "#64748b"
"""Of the runs in one chart, in their order."""
_FEW = 30
"""A series of fewer points shows each as a dot."""
_TOOLS = "xpan,xwheel_zoom,box_zoom,reset"

Values = tuple[list[float], list[float]]
Series = Callable[[RunFigures], Values]


class Curve(NamedTuple):
    """A chart over the batches of a run: the x and y values of each series."""

    title: str
    series: dict[str, Series]


def _of(name: str) -> Series:
    def values(run: RunFigures) -> Values:
        lines = [line for line in run.lines if line.get(name) is not None]
        return [line["step"] for line in lines], [float(line[name]) for line in lines]

    return values


def _accuracy(run: RunFigures) -> Values:
    lines = [line for line in run.evaluations if line["accuracy"] is not None]
    return [line["version"] for line in lines], [line["accuracy"] for line in lines]


def _trainer_rate(run: RunFigures) -> Values:
    return [line["step"] for line in run.lines], [line["num_tokens"] / line["seconds_total"] for line in run.lines]


def _sampler_rate(run: RunFigures) -> Values:
    steps, rates = [], []
    for before, line in pairs(run.lines):
        steps.append(line["step"])
        rates.append((line["sampler_tokens"] - before["sampler_tokens"]) / (line["time"] - before["time"]))
    return steps, rates


CURVES = (
    Curve("Reward", {"mean": _of("reward_mean"), "lowest": _of("reward_min"), "highest": _of("reward_max")}),
    Curve("Accuracy of evaluations", {"accuracy": _accuracy}),
    Curve("Staleness (versions)", {"mean": _of("staleness_mean"), "99th percentile": _of("staleness_p99")}),
    Curve("KL of sampler and trainer (k3)", {"KL": _of("behavior_proximal_kl")}),
    Curve("Effective sample size", {"share": _of("effective_sample_size")}),
    Curve("Entropy (nats)", {"entropy": _of("entropy")}),
    Curve("Response length (tokens)", {"mean": _of("response_length_mean")}),
    Curve("Gradient norm", {"norm": _of("grad_norm")}),
    Curve("Tokens per second", {"trainer": _trainer_rate, "samplers": _sampler_rate}),
    Curve(
        "Weight update (seconds)",
        {"stall of a sampler": _of("weight_stall_seconds"), "publication": _of("publication_seconds")},
    ),
    Curve("Seconds per batch", {"total": _of("seconds_total"), "idle": _of("trainer_idle_seconds")}),
    Curve("Groups whose rewards are all equal", {"groups": _of("equal_reward_groups")}),
)
_DASHES = "solid", "dotted", "dashed"


class Drawn(NamedTuple):
    """One line of a chart."""

    key: str
    """The same whenever the run is drawn."""
    run: int
    """Place of the run, which gives the color."""
    name: str
    dash: str
    values: Values


def drawn(curve: Curve, runs: Sequence[RunFigures]) -> list[Drawn]:
    """The series of a curve for which a run has values."""
    return [
        Drawn(f"{curve.title}/{place}/{name}", place, name, dash, values)
        for place, run in enumerate(runs)
        for (name, series), dash in zip(curve.series.items(), _DASHES, strict=False)
        if (values := series(run))[0]
    ]


def columns(line: Drawn, runs: Sequence[RunFigures]) -> dict[str, list[float] | list[str]]:
    """The columns of the data source of a line."""
    label = line.name if len(runs) == 1 else f"{runs[line.run].name}: {line.name}"
    steps, points = line.values
    return {"step": steps, "value": points, "name": [label] * len(steps)}


def curves(
    runs: Sequence[RunFigures], thin: Callable[[Values], Values] = lambda values: values
) -> Iterator[tuple[str, figure]]:
    """Title and chart of every curve for which a run has values. All share the x axis. `thin` leaves points out."""
    shared = None
    for curve in CURVES:
        lines = drawn(curve, runs)
        if not lines:
            continue
        chart = new_chart(180, **({} if shared is None else {"x_range": shared}))
        shared = chart.x_range
        for line in lines:
            source = ColumnDataSource(columns(line._replace(values=thin(line.values)), runs), name=line.key)
            # The colors of several runs are explained at the top of the page.
            legend = {"legend_label": line.name} if len(curve.series) > 1 else {}
            color = COLORS[line.run % len(COLORS)]
            chart.line("step", "value", source=source, color=color, line_dash=line.dash, line_width=1.5, **legend)
            if len(line.values[0]) < _FEW:
                chart.scatter("step", "value", source=source, color=color, size=4)
        if len(curve.series) > 1:
            legend_below(chart)
        chart.add_tools(HoverTool(tooltips=[("batch", "@step"), ("@name", "@value{0.[0000]}")], mode="vline"))
        yield curve.title, chart


def pairs(lines: Sequence[Line], seconds: float = 0.0) -> Iterator[tuple[Line, Line]]:
    """The lines at both ends of intervals of more than so many seconds, within one life of the trainer."""
    before = lines[0] if lines else {}
    for line in lines[1:]:
        if line.get("replayed"):
            before = line
        elif line["time"] > before["time"] + seconds:
            yield before, line
            before = line


def legend_below(chart: figure) -> None:
    """Moves the legend out of the plot, which keeps its height."""
    legend = chart.legend[0]
    chart.add_layout(legend, "below")
    legend.orientation, legend.ncols, legend.location = "horizontal", 9, "left"
    legend.label_text_font_size, legend.border_line_color, legend.background_fill_alpha = "8pt", None, 0.0
    legend.margin, legend.padding, legend.glyph_width, legend.glyph_height = 0, 0, 14, 14
    chart.height += 30


def new_chart(height: int, **options: object) -> figure:
    chart = figure(height=height, sizing_mode="stretch_width", tools=_TOOLS, toolbar_location=None, **options)
    chart.background_fill_alpha = chart.border_fill_alpha = 0.0
    chart.outline_line_color = None
    chart.grid.grid_line_alpha = 0.4
    return chart
