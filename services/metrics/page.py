"""The page that Prometheus reads: the figures of a service under their names, made at the moment it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tandem.rollout.environments.tools.outcomes import BOUNDS_SECONDS, Durations
from tandem.services.metrics.names import BASE_LABELS, METRICS, Figures, Source

Sources = Mapping[Source, Callable[[], Figures]]
"""What a service reports, by the tables of `names.METRICS`. Called for every page."""

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
_BOUNDS = [*map(str, BOUNDS_SECONDS), "+Inf"]


class _Figures(Collector):
    def __init__(self, run_id: str, name: str, sources: Sources) -> None:
        service, _, replica = name.partition("-")
        self._labels = (run_id, service, replica or "0")
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        figures = {source: read() for source, read in self._sources.items()}
        for metric in METRICS:
            labels = (*BASE_LABELS, *(label.name for label in metric.labels))
            family = _FAMILIES[metric.kind](metric.name, metric.help, labels=labels)
            for source in metric.source:
                for values, value in metric.samples(figures.get(source, {})):
                    _add(family, (*self._labels, *values), value)
            if family.samples:
                yield family


def _add(family: Family, labels: tuple[str, ...], value: float | Durations) -> None:
    if isinstance(value, Durations):
        assert isinstance(family, HistogramMetricFamily), "durations are shown as a histogram"
        family.add_metric(labels, list(zip(_BOUNDS, value.cumulative(), strict=True)), value.total_seconds)
    else:
        assert not isinstance(family, HistogramMetricFamily), "a histogram shows durations"
        family.add_metric(labels, value)


def page_of(run_id: str, name: str, sources: Sources) -> Callable[[], bytes]:
    """Makes the page of a service in Prometheus' text format. The call raises what the sources raise."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(run_id, name, sources))
    return lambda: generate_latest(registry)
