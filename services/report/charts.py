"""The charts of a report, as Bokeh figures. Each takes one run or two runs that are compared."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
from bokeh.palettes import Blues9
from bokeh.plotting import figure
from bokeh.transform import dodge

from tandem.services.report.run_data import RunData
from tandem.services.run.metrics import Line
from tandem.trainer.off_policy.options import WEIGHT_EDGES

COLORS = "#2563eb", "#ea580c"
"""Of the run and of the one it is compared with."""
_PHASES = {
    "claim": ("waits for scored groups", "#d4d4d8"),
    "read": ("reads the batch", "#a5b4fc"),
    "record": ("records the batch", "#818cf8"),
    "forward_proximal": ("recomputes log-probs", "#38bdf8"),
    "train": ("trains", "#2563eb"),
    "evaluate": ("waits for an evaluation", "#fbbf24"),
    "publish": ("publishes weights", "#16a34a"),
}
"""Phases of a batch (`seconds_<phase>` in metrics.jsonl) in their order in the trainer's loop."""
_REST = "outside these phases", "#f4f4f5"
_BEAT_SECONDS = 2.0  # services report their busy time every second
_TOOLS = "xpan,xwheel_zoom,box_zoom,reset"
_AGE = re.compile(r"staleness_(\d)(?:_plus)?/num_loss_tokens")

Series = Callable[[RunData], tuple[list[float], list[float]]]


class Curve(NamedTuple):
    """A chart over the batches of a run: the x and y values of each series."""

    title: str
    series: dict[str, Series]


def _of(name: str) -> Series:
    def values(run: RunData) -> tuple[list[float], list[float]]:
        lines = [line for line in run.lines if line.get(name) is not None]
        return [line["step"] for line in lines], [float(line[name]) for line in lines]

    return values


def _accuracy(run: RunData) -> tuple[list[float], list[float]]:
    return [line["version"] for line in run.evaluations], [line["accuracy"] for line in run.evaluations]


def _trainer_rate(run: RunData) -> tuple[list[float], list[float]]:
    return [line["step"] for line in run.lines], [line["num_tokens"] / line["seconds_total"] for line in run.lines]


def _sampler_rate(run: RunData) -> tuple[list[float], list[float]]:
    steps, rates = [], []
    for before, line in _pairs(run.lines):
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
        {"stall of a sampler": _of("weight_stall_seconds"), "publish": _of("seconds_publish")},
    ),
    Curve("Seconds per batch", {"total": _of("seconds_total"), "idle": _of("trainer_idle_seconds")}),
    Curve("Groups whose rewards are all equal", {"groups": _of("equal_reward_groups")}),
)
_DASHES = "solid", "dotted", "dashed"


def curves(runs: Sequence[RunData]) -> Iterator[tuple[str, figure]]:
    """Title and chart of every curve for which a run has values. All share the x axis."""
    shared = None
    for curve in CURVES:
        drawn = [
            (run, color, name, dash, values)
            for run, color in zip(runs, COLORS, strict=False)
            for (name, series), dash in zip(curve.series.items(), _DASHES, strict=False)
            if (values := series(run))[0]
        ]
        if not drawn:
            continue
        chart = _chart(180, **({} if shared is None else {"x_range": shared}))
        shared = chart.x_range
        for run, color, name, dash, (steps, points) in drawn:
            label = name if len(runs) == 1 else f"{run.name}: {name}"
            source = ColumnDataSource({"step": steps, "value": points, "name": [label] * len(steps)})
            # The colors of two runs are explained at the top of the page.
            legend = {"legend_label": name} if len(curve.series) > 1 else {}
            chart.line("step", "value", source=source, color=color, line_dash=dash, line_width=1.5, **legend)
            if len(steps) < 30:
                chart.scatter("step", "value", source=source, color=color, size=4)
        if len(curve.series) > 1:
            _legend_below(chart)
        chart.add_tools(HoverTool(tooltips=[("batch", "@step"), ("@name", "@value{0.[0000]}")], mode="vline"))
        yield curve.title, chart


def timeline(run: RunData) -> Iterator[tuple[str, figure]]:
    """What each service did when, over the seconds since the first batch began: the trainer's phases, and the share of
    time in which samplers and scorers worked. All share the x axis.
    """
    if not run.lines:
        return
    start = run.lines[0]["time"] - run.lines[0]["seconds_total"]
    end = run.lines[-1]["time"] - start
    shared = Range1d(max(0.0, end - 30.0), end, bounds=(0.0, end))
    chart = _chart(120, x_range=shared, y_range=(0, 1))
    for phase, (label, color) in (*_PHASES.items(), ("rest", _REST)):
        bars = [(left - start, right - start, line["step"]) for line in run.lines for left, right in _bar(line, phase)]
        if bars:
            lefts, rights, steps = zip(*bars, strict=True)
            source = ColumnDataSource({"left": lefts, "right": rights, "step": steps, "phase": [label] * len(bars)})
            chart.quad("left", "right", 1, 0, source=source, color=color, line_color=None, legend_label=label)
    chart.add_tools(
        HoverTool(tooltips=[("batch", "@step"), ("trainer", "@phase"), ("from", "@left"), ("to", "@right")])
    )
    chart.yaxis.visible = False
    _legend_below(chart)
    yield "Trainer", chart
    for title, name, color in (
        ("Samplers: share of time in which they generate", "sampler_busy_seconds", "#db2777"),
        ("Scorers: share of time in which they score", "scorer_busy_seconds", "#9333ea"),
    ):
        pairs = [(before, line) for before, line in _pairs(run.lines, _BEAT_SECONDS) if name in before and name in line]
        if pairs:
            chart = _chart(110, x_range=shared, y_range=(0, 1))
            shares = [_share(before, line, name) for before, line in pairs]
            begins, ends = [a["time"] - start for a, _ in pairs], [b["time"] - start for _, b in pairs]
            source = ColumnDataSource({"left": begins, "right": ends, "share": shares})
            chart.quad("left", "right", "share", 0, source=source, color=color, line_color=None)
            chart.add_tools(HoverTool(tooltips=[("share", "@share{0%}")]))
            yield title, chart


def idle(runs: Sequence[RunData]) -> figure:
    """Seconds of all batches by phase of the trainer."""
    names = [label for label, _ in _PHASES.values()] + [_REST[0]]
    chart = _chart(40 + 40 * len(runs), y_range=[run.name for run in runs])
    totals = [
        {label: sum(line.get(f"seconds_{phase}", 0.0) for line in run.lines) for phase, (label, _) in _PHASES.items()}
        | {_REST[0]: sum(_rest_seconds(line) for line in run.lines)}
        for run in runs
    ]
    data = {"run": [run.name for run in runs]} | {name: [one[name] for one in totals] for name in names}
    colors = [color for _, color in _PHASES.values()] + [_REST[1]]
    chart.hbar_stack(names, y="run", height=0.7, color=colors, source=ColumnDataSource(data), legend_label=names)
    chart.add_tools(HoverTool(tooltips="$name: @$name{0.0} s"))
    _legend_below(chart)
    return chart


def staleness(runs: Sequence[RunData]) -> figure:
    """Share of the trained answers by staleness, over the whole run."""
    chart = _chart(220)
    width = 0.8 / len(runs)
    for index, (run, color) in enumerate(zip(runs, COLORS, strict=False)):
        counts: Counter[int] = Counter()
        for line in run.lines:
            counts.update(dict(enumerate(line["staleness_counts"])))
        total = counts.total() or 1
        places = [age + (index - (len(runs) - 1) / 2) * width for age in counts]
        shares = [count / total for count in counts.values()]
        source = ColumnDataSource({"x": places, "share": shares, "age": list(counts), "count": list(counts.values())})
        chart.vbar("x", width, "share", source=source, color=color)
    chart.add_tools(HoverTool(tooltips=[("staleness", "@age"), ("answers", "@count (@share{0.0%})")]))
    chart.xaxis.ticker.desired_num_ticks, chart.xaxis.ticker.mantissas = 10, [1, 2, 5]
    chart.xaxis.ticker.min_interval = 1
    chart.yaxis.formatter = NumeralTickFormatter(format="0%")
    return chart


def weights(run: RunData) -> figure | None:
    """Share of the trained tokens by behavior weight, one series for each staleness. None without metrics of it."""
    edges = ["0", *(f"{edge:g}" for edge in WEIGHT_EDGES), "∞"]
    bins = [f"{low} – {high}" for low, high in itertools.pairwise(edges)]
    tokens: Counter[str] = Counter()
    totals: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * len(bins))
    for line in run.lines:
        for key in filter(_AGE.fullmatch, line):
            age = key.partition("/")[0]
            if f"{age}/behavior_weight_share_0" in line:
                tokens[age] += line[key]
                for number in range(len(bins)):
                    totals[age][number] += line[key] * line[f"{age}/behavior_weight_share_{number}"]
    if not totals:
        return None
    chart = _chart(240, x_range=bins)
    width = 0.85 / len(totals)
    for index, age in enumerate(sorted(totals)):
        shares = [count / max(1.0, tokens[age]) for count in totals[age]]
        label = f"staleness {age.removeprefix('staleness_').replace('_plus', ' or more')}"
        source = ColumnDataSource({"bin": bins, "share": shares, "age": [label] * len(bins)})
        place = dodge("bin", (index - (len(totals) - 1) / 2) * width, range=chart.x_range)
        color = Blues9[max(0, 6 - index)]
        chart.vbar(place, width, "share", source=source, color=color, legend_label=label)
    chart.add_tools(HoverTool(tooltips=[("weight", "@bin"), ("@age", "@share{0.00%}")]))
    chart.yaxis.formatter = NumeralTickFormatter(format="0%")
    _legend_below(chart)
    return chart


def distributions(runs: Sequence[RunData]) -> Iterator[tuple[str, figure]]:
    """Title and chart of what is summed over a whole run."""
    if any(run.lines for run in runs):
        yield "Seconds of the trainer by phase", idle(runs)
        yield "Staleness of the trained answers", staleness(runs)
    for run in runs:
        if (chart := weights(run)) is not None:
            whose = f" of {run.name}" if len(runs) > 1 else ""
            yield f"Importance weights π_trainer/π_sampler by staleness{whose}", chart


def _pairs(lines: Sequence[Line], seconds: float = 0.0) -> Iterator[tuple[Line, Line]]:
    """The lines at both ends of intervals of more than so many seconds, within one life of the trainer."""
    before = lines[0] if lines else {}
    for line in lines[1:]:
        if line.get("replayed"):
            before = line
        elif line["time"] > before["time"] + seconds:
            yield before, line
            before = line


def _share(before: Line, line: Line, name: str) -> float:
    share: float = (line[name] - before[name]) / (line["time"] - before["time"])
    return min(1.0, max(0.0, share))


def _bar(line: Line, wanted: str) -> Iterator[tuple[float, float]]:
    """Begin and end of a phase. What is in no phase comes first: outputs of the batch before."""
    place = line["time"] - line["seconds_total"]
    for phase in ("rest", *_PHASES):
        seconds = _rest_seconds(line) if phase == "rest" else line.get(f"seconds_{phase}", 0.0)
        if phase == wanted and seconds > 0:
            yield place, place + seconds
        place += seconds


def _rest_seconds(line: Line) -> float:
    known: float = sum(line.get(f"seconds_{phase}", 0.0) for phase in _PHASES)
    return max(0.0, float(line["seconds_total"]) - known)


def _legend_below(chart: figure) -> None:
    """Moves the legend out of the plot, which keeps its height."""
    legend = chart.legend[0]
    chart.add_layout(legend, "below")
    legend.orientation, legend.ncols, legend.location = "horizontal", 9, "left"
    legend.label_text_font_size, legend.border_line_color, legend.background_fill_alpha = "8pt", None, 0.0
    legend.margin, legend.padding, legend.glyph_width, legend.glyph_height = 0, 0, 14, 14
    chart.height += 30


def _chart(height: int, **options: object) -> figure:
    chart = figure(height=height, sizing_mode="stretch_width", tools=_TOOLS, toolbar_location=None, **options)
    chart.background_fill_alpha = chart.border_fill_alpha = 0.0
    chart.outline_line_color = None
    chart.grid.grid_line_alpha = 0.4
    return chart
