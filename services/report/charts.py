"""The charts of a report other than its curves, as Bokeh figures: timelines, and what is summed over a whole run."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
from bokeh.palettes import Blues9
from bokeh.plotting import figure
from bokeh.transform import dodge

from tandem.services.report.curves import COLORS, legend_below, new_chart, pairs
from tandem.services.report.run_data import RunData
from tandem.services.run.progress import Line
from tandem.trainer.off_policy.options import WEIGHT_EDGES

_PHASES = {
    "publish": ("copies the weights or begins to", "#16a34a"),
    "claim": ("waits for scored groups", "#d4d4d8"),
    "read": ("reads the batch", "#a5b4fc"),
    "record": ("begins to record the batch", "#818cf8"),
    "forward_proximal": ("recomputes log-probs", "#38bdf8"),
    "train": ("trains", "#2563eb"),
    "acknowledge": ("waits until samplers have the last version", "#4ade80"),
    "evaluate": ("waits for an evaluation", "#fbbf24"),
}
"""Phases of a batch (`seconds_<phase>` in metrics.jsonl) in their order in the trainer's loop."""
_REST = "outside these phases", "#f4f4f5"
_BEAT_SECONDS = 2.0  # services report their busy time every second
_AGE = re.compile(r"staleness_(\d)(?:_plus)?/num_loss_tokens")


def timeline(run: RunData) -> Iterator[tuple[str, figure]]:
    """What each service did when, over the seconds since the first batch began: the trainer's phases, and the share of
    time in which samplers and scorers worked. All share the x axis.
    """
    if not run.lines:
        return
    start = run.lines[0]["time"] - run.lines[0]["seconds_total"]
    end = run.lines[-1]["time"] - start
    shared = Range1d(max(0.0, end - 30.0), end, bounds=(0.0, end))
    chart = new_chart(120, x_range=shared, y_range=(0, 1))
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
    legend_below(chart)
    yield "Trainer", chart
    for title, name, color in (
        ("Samplers: share of time in which they generate", "sampler_busy_seconds", "#db2777"),
        ("Scorers: share of time in which they score", "scorer_busy_seconds", "#9333ea"),
    ):
        beats = [(before, line) for before, line in pairs(run.lines, _BEAT_SECONDS) if name in before and name in line]
        if beats:
            chart = new_chart(110, x_range=shared, y_range=(0, 1))
            shares = [_share(before, line, name) for before, line in beats]
            begins, ends = [a["time"] - start for a, _ in beats], [b["time"] - start for _, b in beats]
            source = ColumnDataSource({"left": begins, "right": ends, "share": shares})
            chart.quad("left", "right", "share", 0, source=source, color=color, line_color=None)
            chart.add_tools(HoverTool(tooltips=[("share", "@share{0%}")]))
            yield title, chart


def idle(runs: Sequence[RunData]) -> figure:
    """Seconds of all batches by phase of the trainer."""
    names = [label for label, _ in _PHASES.values()] + [_REST[0]]
    chart = new_chart(40 + 40 * len(runs), y_range=[run.name for run in runs])
    totals = [
        {label: sum(line.get(f"seconds_{phase}", 0.0) for line in run.lines) for phase, (label, _) in _PHASES.items()}
        | {_REST[0]: sum(_rest_seconds(line) for line in run.lines)}
        for run in runs
    ]
    data = {"run": [run.name for run in runs]} | {name: [one[name] for one in totals] for name in names}
    colors = [color for _, color in _PHASES.values()] + [_REST[1]]
    chart.hbar_stack(names, y="run", height=0.7, color=colors, source=ColumnDataSource(data), legend_label=names)
    chart.add_tools(HoverTool(tooltips="$name: @$name{0.0} s"))
    legend_below(chart)
    return chart


def staleness(runs: Sequence[RunData]) -> figure:
    """Share of the trained answers by staleness, over the whole run."""
    chart = new_chart(220)
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
    chart = new_chart(240, x_range=bins)
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
    legend_below(chart)
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


def _share(before: Line, line: Line, name: str) -> float:
    share: float = (line[name] - before[name]) / (line["time"] - before["time"])
    return min(1.0, max(0.0, share))


def _bar(line: Line, wanted: str) -> Iterator[tuple[float, float]]:
    """Begin and end of a phase. What is in no phase comes before the claim: outputs of the batch before."""
    place = line["time"] - line["seconds_total"]
    for phase in ("publish", "rest", *list(_PHASES)[1:]):
        seconds = _rest_seconds(line) if phase == "rest" else line.get(f"seconds_{phase}", 0.0)
        if phase == wanted and seconds > 0:
            yield place, place + seconds
        place += seconds


def _rest_seconds(line: Line) -> float:
    known: float = sum(line.get(f"seconds_{phase}", 0.0) for phase in _PHASES)
    return max(0.0, float(line["seconds_total"]) - known)
