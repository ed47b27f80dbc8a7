"""Training metrics of a whole batch: sums over all micro-batches and ranks first, then ratios."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, distributed

from tandem.trainer.off_policy.diagnostics import CorrectionSums
from tandem.trainer.off_policy.options import CorrectionOptions


class BatchSums:
    """Sums on one rank until `reduce` adds up all ranks. Only `reduce` synchronises the device."""

    def __init__(self, correction: CorrectionOptions, device: torch.device) -> None:
        self._device = device
        self._options = correction
        self._correction: CorrectionSums | None = None
        self._sums: dict[str, Tensor] = {}
        self._is_share: set[str] = set()

    def add_correction(self, sums: CorrectionSums) -> None:
        """Adds the sums of the off-policy correction of some tokens."""
        moved = sums.to(self._device)
        self._correction = moved if self._correction is None else self._correction + moved

    def add_marks(self, loss: Tensor, marks: Mapping[str, Tensor], num_tokens: int) -> None:
        """Adds one micro-batch: its part of the loss and the marks of its kept tokens."""
        self._add("tokens", torch.tensor(float(num_tokens)))
        self._add("loss", loss.detach())
        for name, values_N in marks.items():
            if values_N.dtype == torch.bool:
                self._is_share.add(name)
            self._add(f"mark/{name}", values_N.double().sum())

    def add_value(self, loss: Tensor, clipped_N: Tensor) -> None:
        """Adds one micro-batch of the critic."""
        self._add("value_tokens", torch.tensor(float(clipped_N.numel())))
        self._add("value_loss", loss.detach())
        self._add("value_clipped", clipped_N.double().sum())

    def _add(self, name: str, value: Tensor) -> None:
        value = value.to(self._device, torch.float64)
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def reduce(self, num_epochs: int) -> dict[str, float]:
        """The metrics of the batch, means over its epochs. Every rank must call it and gets the same; all ranks must
        have added the same kinds of sums.

        `loss` and `value_loss` sum over the optimizer steps of an epoch; the learner divides by their number. Marks are
        means over the trained tokens (`clipped_fraction`: tokens whose gradient the loss bounded). `entropy` is exact
        if the loss has an entropy bonus; otherwise it is the mean of −log π over the sampled tokens, which estimates
        it. trainer/off_policy/diagnostics.py describes the others.
        """
        names = sorted(self._sums)
        values = torch.stack([self._sums[name] for name in names])
        correction = self._correction or CorrectionSums.zeros(self._options).to(self._device)
        if distributed.get_world_size() > 1:
            distributed.all_reduce(values)
            distributed.all_reduce(correction.sums_SK)
            distributed.all_reduce(correction.maxima_SM, distributed.ReduceOp.MAX)
        correction.sums_SK.div_(num_epochs)
        sums = dict(zip(names, values.div_(num_epochs).tolist(), strict=True))
        num_tokens = sums.get("tokens", 0.0)  # missing if the batch only trains the critic
        figures = {"loss": sums.get("loss", 0.0), "trained_tokens": num_tokens, **correction.figures()}
        for name in names:
            kind, _, mark = name.partition("/")
            if kind == "mark":
                figures[f"{mark}_fraction" if mark in self._is_share else mark] = sums[name] / max(1.0, num_tokens)
        if "value_loss" in sums:
            figures["value_loss"] = sums["value_loss"]
            figures["value_clipped_fraction"] = sums["value_clipped"] / max(1.0, sums["value_tokens"])
        return figures
