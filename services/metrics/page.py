"""The page that Prometheus reads: the figures of a service under their names, made at the moment it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.services.metrics.names import BASE_LABELS, METRICS, Figures, Source

Sources = Mapping[Source, Callable[[], Figures]]
"""What a service reports, by the tables of `names.METRICS`. Called for every page."""

Family = CounterMetricFamily | GaugeMetricFamily


class _Figures(Collector):
    def __init__(self, run_id: str, name: str, sources: Sources) -> None:
        service, _, replica = name.partition("-")
        self._labels = (run_id, service, replica or "0")
        self._sources = sources

    def collect(self) -> Iterator[Family]:
        figures = {source: read() for source, read in self._sources.items()}
        for metric in METRICS:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            label = () if metric.label is None else (metric.label.name,)
            family = kind(metric.name, metric.help, labels=(*BASE_LABELS, *label))
            for source in metric.source:
                for values, number in metric.samples(figures.get(source, {})):
                    family.add_metric((*self._labels, *values), number)
            if family.samples:
                yield family


def page_of(run_id: str, name: str, sources: Sources) -> Callable[[], bytes]:
    """Makes the page of a service in Prometheus' text format. The call raises what the sources raise."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(run_id, name, sources))
    return lambda: generate_latest(registry)
