"""Combines several training files, each with a weight, into one dataset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from tandem.services.config.recipe import TrainFile
from tandem.services.data.dataset import Dataset, Row, RowFault


class Mixture:
    """A dataset whose epochs hold `weight` times the rows of each file. With a fractional weight, an epoch continues in
    the file where the previous epoch stopped, so all rows are used equally often. Raises DataError as `Dataset` does.
    """

    def __init__(self, files: Sequence[TrainFile]) -> None:
        self._datasets = [Dataset(file.path) for file in files]
        self._sizes = [len(dataset) for dataset in self._datasets]
        self._counts = [max(1, round(file.weight * size)) for file, size in zip(files, self._sizes, strict=True)]
        self._starts = [0, *accumulate(self._counts)]
        self._first_rows = [0, *accumulate(self._sizes)]
        self.name = ", ".join(str(dataset.file) for dataset in self._datasets)

    def __len__(self) -> int:
        """Number of rows in an epoch."""
        return self._starts[-1]

    @property
    def num_rows(self) -> int:
        """Number of rows in all files."""
        return self._first_rows[-1]

    def locate(self, index: int, epoch: int) -> int:
        """The number, over all files, of the row at an index of an epoch."""
        file = bisect_right(self._starts, index) - 1
        place = epoch * self._counts[file] + index - self._starts[file]
        return self._first_rows[file] + place % self._sizes[file]

    def row(self, index: int, epoch: int) -> Row | RowFault:
        """The row at an index of an epoch. A `Row` carries this index, a `RowFault` the row's index in its file."""
        number = self.locate(index, epoch)
        file = bisect_right(self._first_rows, number) - 1
        row = self._datasets[file].row(number - self._first_rows[file])
        return replace(row, index=index) if isinstance(row, Row) else row
