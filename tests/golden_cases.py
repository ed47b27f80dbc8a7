"""Golden values of learning: inputs and outputs of another implementation (see golden/README.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

_FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class GoldenCase:
    """One call: its inputs, what it must give, and how closely."""

    name: str
    hyper: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    metrics: dict[str, float]
    tolerance: dict[str, float]

    def check(self, name: str, got: Tensor) -> None:
        """Compares with the output of that name."""
        torch.testing.assert_close(
            got.double(), self.outputs[name].double(), **self.tolerance, msg=lambda m: f"{self.name}: {m}"
        )


@cache
def _tensors() -> dict[str, Tensor]:
    return load_file(_FOLDER / "learning.safetensors")


def golden_cases(prefix: str) -> list[GoldenCase]:
    """The cases whose name starts with `prefix`."""
    cases = json.loads((_FOLDER / "learning.json").read_text())["cases"]
    found = [
        GoldenCase(
            case["name"],
            case["hyper"],
            {name: _tensors()[value["key"]] for name, value in case["inputs"].items()},
            {name: _tensors()[value["key"]] for name, value in case["outputs"].items()},
            case["metrics"],
            case["tolerance"],
        )
        for case in cases
        if case["name"].startswith(prefix)
    ]
    assert found, prefix
    return found
