"""Traces of a group's way through the services, by OpenTelemetry: admit, sample, score, train, publish.

On where OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set; the other variables of OpenTelemetry
apply, too. Without them nothing of OpenTelemetry is imported. Run and group determine the id of a trace, so that the
services need not hand one another a context.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from typing import Literal

from tandem.protos.extras import missing_extra_named
from tandem.services.process import in_thread

log = logging.getLogger(__name__)

Step = Literal["admit", "sample", "score", "train", "publish"]
Attributes = dict[str, str | int]

SERVICES: Mapping[Step, str] = {
    "admit": "feed",
    "sample": "rollout",
    "score": "reward",
    "train": "trainer",
    "publish": "trainer",
}
_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_FLUSH_SECONDS = 2.0  # a service that is told to stop is killed some seconds later


def is_traced() -> bool:
    return any(os.environ.get(name) for name in _VARIABLES)


@contextmanager
def group_span(step: Step, run_id: str, group_id: str) -> Iterator[Attributes]:
    """A span of this step of the group, as long as the block. Yields its attributes, to be filled in."""
    attributes: Attributes = {}
    began = time.time_ns()
    try:
        yield attributes
    finally:
        if is_traced():
            add_spans(step, run_id, [group_id], began, attributes)


def add_spans(
    step: Step,
    run_id: str,
    group_ids: Iterable[str],
    began: int,
    attributes: Mapping[str, str | int],
    ended: int | None = None,
) -> None:
    """Adds a span of this step to the trace of each group: from `began` to `ended` (None: now), in nanoseconds since
    1970.
    """
    if not is_traced():
        return
    with missing_extra_named():
        from tandem.services.metrics.spans import export_span
    ended = ended or time.time_ns()
    for group_id in group_ids:
        described = {"tandem.run": run_id, "tandem.group": group_id, **attributes}
        export_span(step, SERVICES[step], trace_of(run_id, group_id), (began, ended), described)


def trace_of(run_id: str, group_id: str) -> tuple[int, int]:
    """The ids of a group's trace and of its root, the span `admit`."""
    digest = sha256(f"{run_id}/{group_id}".encode()).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])


def flush_spans() -> None:
    """Sends the spans that wait, within seconds."""
    spans = sys.modules.get("tandem.services.metrics.spans")
    if spans is None:
        return
    try:
        in_thread("flush-spans", spans.flush).result(_FLUSH_SECONDS)
    except TimeoutError:
        log.warning("the last spans could not be sent within %.0f s", _FLUSH_SECONDS)
