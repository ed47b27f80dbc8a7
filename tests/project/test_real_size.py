"""What the benchmark of a model of real size calls a fault."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.real_size import faults


def record(peak_mib: int = 1000, restarts: int = 0, batches: int = 3, seconds: float = 50.0) -> dict[str, Any]:
    memory = {"trainer": {"peak_mib": peak_mib, "estimated_mib": 1000}}
    plan = {"seconds_of_later_batches": {"measured": seconds, "predicted": 50.0}}
    return {"batches": [{}] * batches, "restarts": restarts, "memory": memory, "plan": plan}


@pytest.mark.parametrize(("peak_mib", "seconds"), [(801, 59.0), (1000, 50.0), (1199, 41.0)])
def test_a_whole_run_near_its_estimates_has_no_fault(peak_mib: int, seconds: float) -> None:
    assert list(faults(record(peak_mib, seconds=seconds), 3)) == []


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (record(peak_mib=1210), "memory of the trainer: +21% beside its estimate"),
        (record(peak_mib=790), "memory of the trainer: -21% beside its estimate"),
        (record(seconds=61.0), "seconds_of_later_batches: +22% beside the prediction"),
        ({**record(), "plan": {}}, "nothing can be compared with the predictions"),
        (record(restarts=2), "2 services were restarted"),
        (record(batches=1), "1 of 3 batches were trained"),
    ],
)
def test_each_fault_is_named(found: dict[str, Any], said: str) -> None:
    assert list(faults(found, 3)) == [said]
