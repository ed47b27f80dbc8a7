"""A run exports the traces of its groups to a real OTLP receiver; the same run feeds both trackers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tandem.services.metrics.tracing import SERVICES, trace_of
from tests.support.processes import run_python
from tests.support.whole_run import WholeRun

Span = dict[str, Any]


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for one in request.resource_spans:
            service = next(each.value.string_value for each in one.resource.attributes if each.key == "service.name")
            for span in (span for scope in one.scope_spans for span in scope.spans):
                values = {each.key: each.value.string_value or each.value.int_value for each in span.attributes}
                self.spans.append({"span": span, "service": service, **values})
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def receiving() -> Iterator[tuple[Receiver, str]]:
    receiver, server = Receiver(), grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver, f"http://127.0.0.1:{port}"
    finally:
        server.stop(1).wait(10)


@pytest.mark.system
@pytest.mark.timeout(300)
def test_one_trace_holds_the_whole_way_of_a_group(tmp_path: Path) -> None:
    sizes = {"total_batches": 3, "trackers": ["wandb", "mlflow"]}
    run = WholeRun(tmp_path, run=sizes, rollout={"engine": "transformers", "max_response_tokens": 16})
    with receiving() as (receiver, address):
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": ""}
        done = run.tandem("run", str(run.recipe), **variables)
    assert done.returncode == 0, done.stdout[-3000:] + run.logs()

    traces: dict[bytes, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in receiver.spans:
        traces[span["span"].trace_id][span["span"].name].append(span)
    trained = {group: version for version, groups in run.records().items() for group in (g.group_id for g in groups)}
    assert len(trained) == 12
    for group, version in trained.items():
        trace_id, root = trace_of("whole", group)
        steps = traces[trace_id.to_bytes(16)]
        assert steps.keys() == SERVICES.keys(), group
        spans = {name: found[-1] for name, found in steps.items()}
        assert {name: span["service"] for name, span in spans.items()} == {
            step: f"tandem-{service}" for step, service in SERVICES.items()
        }
        assert spans["admit"]["span"].span_id == root.to_bytes(8) and not spans["admit"]["span"].parent_span_id
        assert all(spans[name]["span"].parent_span_id == root.to_bytes(8) for name in SERVICES if name != "admit")
        assert spans["train"]["tandem.version"] == spans["publish"]["tandem.version"] == version
        assert spans["sample"]["tandem.tokens"] == 4 * 16
        ends = [spans[name]["span"].end_time_unix_nano for name in SERVICES]
        assert ends == sorted(ends)
        assert spans["publish"]["span"].start_time_unix_nano >= spans["train"]["span"].end_time_unix_nano
    assert all(span["tandem.run"] == "whole" for span in receiver.spans)

    assert list((run.folder / "wandb").glob("offline-run-*/*.wandb"))
    (rewards,) = (run.folder / "mlflow").glob("*/*/metrics/reward_mean")
    assert len(rewards.read_text().splitlines()) == 3
    assert "figures are missing" not in run.logs()


def test_without_the_variable_no_exporter_is_imported() -> None:
    """redis-py imports other parts of OpenTelemetry where it is installed."""
    code = (
        "import sys\nimport tandem.services.feed_service, tandem.services.reward.service\n"
        "from tandem.services.metrics.tracing import add_spans, group_span, flush_spans\n"
        "add_spans('admit', 'r', ['0-0'], 0, {})\n"
        "with group_span('score', 'r', '0-0'): pass\n"
        "flush_spans()\n"
        "print(*[name for name in sys.modules if 'opentelemetry.exporter' in name or 'metrics.spans' in name])"
    )
    done = run_python("-c", code, OTEL_EXPORTER_OTLP_ENDPOINT="")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_collector_that_is_gone_does_not_hold_the_end_of_a_process_up() -> None:
    code = (
        "import time\nfrom tandem.services.metrics import tracing\ntracing._FLUSH_SECONDS = 0.5\n"
        "tracing.add_spans('admit', 'r', ['0-0'], time.time_ns(), {})\ntracing.flush_spans()\nprint('ended')"
    )
    done = run_python("-c", code, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert (done.returncode, done.stdout.strip()) == (0, "ended"), done.stderr
    assert "could not be sent" in done.stderr
