"""The charts of the page: the report's curves as Bokeh's document, and the data with which they grow."""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.embed.util import OutputDocumentFor, standalone_docs_json_and_render_items

from tandem.services.dashboard.figures import Figures, thinned
from tandem.services.report.curves import COLORS, CURVES, columns, curves, drawn


def document(runs: Sequence[Figures], theme: str | None = None) -> dict[str, object]:
    """What `Bokeh.embed.embed_items` needs, the title of each chart by the id of its element, and the data's shape."""
    _read(runs)
    charts = dict(curves(runs, thinned))
    if not charts:
        return {"titles": {}, "shape": []}
    with OutputDocumentFor(list(charts.values()), apply_theme=theme):
        documents, (item,) = standalone_docs_json_and_render_items(list(charts.values()))
        items = [item.to_json()]
        elements = [item.roots[place].elementid for place in range(len(charts))]
    return {
        "documents": documents,
        "items": items,
        "titles": dict(zip(elements, charts, strict=True)),
        "colors": [COLORS[place % len(COLORS)] for place in range(len(runs))],
        "shape": _shape(runs),
    }


def data(runs: Sequence[Figures]) -> dict[str, object]:
    """The columns of every line by its key. The charts must be drawn anew when `shape` has changed."""
    _read(runs)
    found = {
        line.key: columns(line._replace(values=thinned(line.values)), runs)
        for curve in CURVES
        for line in drawn(curve, runs)
    }
    return {"lines": found, "shape": _shape(runs)}


def _read(runs: Sequence[Figures]) -> None:
    """For runs that are compared: nobody may be watching them."""
    for run in runs:
        run.read()


def _shape(runs: Sequence[Figures]) -> list[str]:
    return [line.key for curve in CURVES for line in drawn(curve, runs)]
