"""Golden values of learning: inputs and outputs of another implementation (see golden/README.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.paths import GOLDEN

_FOLDER = GOLDEN


@dataclass(frozen=True)
class GoldenCase:
    """One call: inputs, outputs, tolerances. The value of a `peculiar` case depends on a convention in `notes`."""

    name: str
    hyper: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    where: dict[str, str]
    metrics: dict[str, float]
    tolerance: dict[str, float]
    peculiar: bool
    notes: str

    def check(self, name: str, got: Tensor) -> None:
        """Compares with the output of that name where the case defines it."""
        want = self.outputs[name].double()
        assert got.shape == want.shape, f"{self.name}: {name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
        got = got.detach().double()
        if name in self.where:
            valid = self.inputs[self.where[name]].bool()
            got, want = got[valid], want[valid]
        torch.testing.assert_close(got, want, **self.tolerance, msg=lambda m: f"{self.name}: {name}: {m}")

    def check_metric(self, name: str, got: float) -> None:
        """Compares with the metric of that name."""
        tolerance = _index()["metric_tolerance"]["suffix:_std" if name.endswith("_std") else "default"]
        want = pytest.approx(self.metrics[name], rel=tolerance["rtol"], abs=tolerance["atol"], nan_ok=True)
        assert got == want, f"{self.name}: {name}"


@cache
def _index() -> dict[str, Any]:
    return dict(json.loads((_FOLDER / "cases.json").read_text()))


@cache
def _tensors(file: str) -> dict[str, Tensor]:
    return load_file(_FOLDER / file)


def golden_cases(prefix: str) -> list[GoldenCase]:
    """The cases whose name starts with `prefix`."""
    found = [_case(case) for case in _index()["cases"] if case["name"].startswith(prefix)]
    assert found, prefix
    return found


def _case(case: dict[str, Any]) -> GoldenCase:
    def tensors(kind: str) -> dict[str, Tensor]:
        return {name: _tensors(case["file"])[value["key"]] for name, value in case.get(kind, {}).items()}

    return GoldenCase(
        name=case["name"],
        hyper=case["hyper"],
        inputs=tensors("inputs"),
        outputs=tensors("outputs"),
        where={name: value["where"] for name, value in case["outputs"].items() if "where" in value},
        metrics=case.get("metrics", {}),
        tolerance=case["tolerance"],
        peculiar=case.get("peculiar", False),
        notes=str(case.get("notes", "")),
    )


def flatten(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(values_N, lengths_B) of the positions where the mask is not 0. Differentiable."""
    assert values_BT.shape == mask_BT.shape, (values_BT.shape, mask_BT.shape)
    return values_BT[mask_BT.bool()], mask_BT.bool().sum(1)


def unflatten(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """The inverse of `flatten`, 0 where the mask is 0."""
    values_BT = torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device)
    return values_BT.masked_scatter(mask_BT.bool(), values_N)
