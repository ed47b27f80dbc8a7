"""Exports spans by OTLP over gRPC. Only `tandem.services.metrics.tracing` imports this module, and only if asked to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags


class _Ids(RandomIdGenerator):
    """Random ids, but those that are set for the next span, which is the root of its trace."""

    root: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.root is None else self.root[0]

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self.root is None else self.root[1]


_ids = _Ids()


def export_span(
    name: str, service: str, ids: tuple[int, int], times: tuple[int, int], attributes: Mapping[str, str | int]
) -> None:
    """Adds a span to the trace with these ids. `admit` is the root of its trace, the others are below it."""
    context = Context()
    if name == "admit":
        _ids.root = ids
    else:
        root = SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        context = trace.set_span_in_context(NonRecordingSpan(root))
    began, ended = times
    span = _provider(service).get_tracer("tandem").start_span(name, context, attributes=attributes, start_time=began)
    _ids.root = None
    span.end(ended)


def flush() -> None:
    """Sends the spans that wait."""
    for processor in _processors:
        processor.force_flush()


_processors: list[BatchSpanProcessor] = []


@lru_cache(maxsize=1)
def _provider(service: str) -> TracerProvider:
    """Made at the first span: samplers fork their engine before that, which must not inherit a thread of gRPC."""
    name = os.environ.get("OTEL_SERVICE_NAME", f"tandem-{service}")
    # Python's clean-up would wait for an unreachable collector; `flush` is called instead.
    provider = TracerProvider(
        resource=Resource.create({"service.name": name}), id_generator=_ids, shutdown_on_exit=False
    )
    processor = BatchSpanProcessor(OTLPSpanExporter())
    provider.add_span_processor(processor)
    _processors.append(processor)
    return provider
