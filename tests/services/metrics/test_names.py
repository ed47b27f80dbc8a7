"""The names of the metrics follow Prometheus' rules, come from figures that services report, and are documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandem.protos.errors import ConfigError
from tandem.services.buffer.starvation import CAUSES, Observation
from tandem.services.data.dataset import FaultReason, UnusableReason
from tandem.services.metrics import docs
from tandem.services.metrics.ledger import ledger_figures
from tandem.services.metrics.names import METRICS, Label, Metric
from tandem.services.metrics.page import Sources, page_of
from tandem.services.metrics.ports import OFFSETS, PORT_VARIABLE, metrics_port
from tandem.services.run.watchdog import observe
from tests.support.redis_ring import new_run
from tests.support.run_inputs import recipe_of, small_values

UNITS = ("_total", "_seconds", "_bytes", "_ratio", "_groups", "_versions", "_nats")


def by_name(page: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    families = text_string_to_metric_families(page.decode())
    samples = [sample for family in families for sample in family.samples]
    return {one.name: [(s.labels, s.value) for s in samples if s.name == one.name] for one in samples}


def test_names_are_unique_and_counters_end_with_total() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"tandem_[a-z_]+", name) for name in names)
    assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in METRICS)
    assert all(metric.help.endswith(".") for metric in METRICS)
    assert all(len(metric.labels) == 1 for metric in METRICS if metric.figure.count("*") == 1)
    assert all(metric.source == ("tools",) for metric in METRICS if metric.labels and "*" not in metric.figure)


def test_the_page_of_the_documents_lists_them() -> None:
    assert docs.with_list(docs.PAGE.read_text()) == docs.PAGE.read_text(), "run python -m tandem.services.metrics.docs"


def test_a_page_has_the_figures_of_a_service_with_its_labels() -> None:
    figures = {"groups_completed": 3.0, "groups_held": 2, "rows_scored": 7, "rows_unscored:timeout": 1}
    page = page_of("mine", "reward", {"reward": lambda: figures, "service": lambda: {"started_at": 5.0}})
    found = by_name(page())
    labels = {"run": "mine", "service": "reward", "replica": "0"}
    assert found == {
        "tandem_start_time_seconds": [(labels, 5.0)],
        "tandem_groups_ended_total": [({**labels, "outcome": "completed"}, 3.0)],
        "tandem_groups_held": [(labels, 2.0)],
        "tandem_reward_scored_rows_total": [(labels, 7.0)],
        "tandem_reward_unscored_rows_total": [({**labels, "reason": "timeout"}, 1.0)],
    }


def test_values_that_are_not_in_the_list_of_a_label_count_as_other() -> None:
    counted = Metric("tandem_x_total", "counter", ("feed",), "x:*", "X.", (Label("reason", ("a",), is_open=True),))
    assert list(counted.samples({"x:a": 1, "x:b": 2, "x:c": 3, "x": 9, "y:a": 4})) == [(("a",), 1.0), (("other",), 5.0)]


def test_what_is_not_measured_or_no_number_is_left_out() -> None:
    page = page_of("mine", "trainer", {"batch": lambda: {"weight_transfer_seconds": None, "step": True}})
    assert by_name(page()) == {}


def test_the_reasons_for_skipped_rows_are_those_of_the_dataset() -> None:
    (skipped,) = [metric for metric in METRICS if metric.figure == "rows_skipped:*"]
    (label,) = skipped.labels
    reasons = {one for part in get_args(FaultReason) for one in (get_args(part) or (part,))} | {
        *get_args(UnusableReason)
    }
    assert set(label.values) == reasons


def test_the_ledger_of_a_run_is_shown_and_adds_up(redis_url: str, tmp_path: Path) -> None:
    recipe = recipe_of(small_values(tmp_path), run={"staleness_budget": 1})
    buffer = new_run(redis_url)
    buffer.admit([("0-0", b"prompt"), ("0-1", b"prompt")], 2)
    buffer.register_service("feed", "")
    buffer.register_service("trainer", "")
    buffer.heartbeat("feed", {})
    buffer.heartbeat("trainer", {"starved_seconds": 70.0})
    found = by_name(page_of("mine", "controller", {"ledger": lambda: ledger_figures(observe(buffer, recipe))})())
    of_state = {labels["state"]: value for labels, value in found["tandem_ledger_groups"]}
    assert of_state["prompts_waiting"] == 2 == found["tandem_ledger_admitted_groups_total"][0][1]
    assert [value for _, value in found["tandem_ledger_mismatch_groups"]] == [0.0]
    assert [value for _, value in found["tandem_ledger_credits"]] == [4.0]
    assert {labels["state"]: value for labels, value in found["tandem_samplers"]}["LIVE"] == 1
    assert [labels["of"] for labels, _ in found["tandem_silence_seconds"]] == ["feed", "trainer"]
    starved = {labels["cause"]: value for labels, value in found["tandem_starved_seconds"]}
    assert starved == {**dict.fromkeys(CAUSES, 0.0), "samplers_slow": 70.0}


def test_without_redis_the_page_says_that_it_is_away() -> None:
    sources: Sources = {"ledger": lambda: ledger_figures(Observation(redis_silence=20.0))}
    found = by_name(page_of("mine", "controller", sources)())
    assert set(found) == {"tandem_starved_seconds"}
    assert {labels["cause"]: value for labels, value in found["tandem_starved_seconds"] if value} == {
        "redis_away": 20.0
    }


def test_ports_follow_from_the_lowest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORT_VARIABLE, raising=False)
    assert [metrics_port(9400, name) for name in ("controller", "feed", "reward", "trainer")] == [
        9400,
        9401,
        9402,
        9403,
    ]
    assert [metrics_port(9400, name) for name in ("rollout-0", "rollout-7", "reward-1")] == [9410, 9417, 9901]
    assert {metrics_port(0, service) for service in OFFSETS} == {0}


def test_a_container_has_one_port_whatever_runs_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT_VARIABLE, "9400")
    assert {metrics_port(base, name) for base in (0, 9000) for name in ("feed", "rollout-3")} == {9400}
    monkeypatch.setenv(PORT_VARIABLE, "0")
    assert metrics_port(9000, "feed") == 0
    monkeypatch.setenv(PORT_VARIABLE, "many")
    with pytest.raises(ConfigError, match=PORT_VARIABLE):
        metrics_port(0, "feed")
