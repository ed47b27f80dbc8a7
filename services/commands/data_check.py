"""`tandem data check`: checks a dataset file row by row, and prints a summary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem.protos.errors import DataError
from tandem.services.command_line import cell
from tandem.services.data.chat import ChatEncoder, RefusedPromptError
from tandem.services.data.dataset import COLUMNS, READ_COLUMNS, Dataset, Row, RowFault
from tandem.services.data.overlap import num_shared

_MOST_ROWS_SHOWN = 20
_EXPLAINED = {
    "malformed": "not one JSON object, or a field that cannot be used",
    "prompt_type": "the prompt is neither a text nor a list of chat messages with text",
    "unknown_role": "a message's role is not known",
    "empty": "no prompt, or no text in it",
    "no_ground_truth": "no ground truth in reward_model, ground_truth, answer or solution",
    "refused_by_template": "the chat template or the tokenizer refuses it",
    "too_long": "more tokens than allowed",
    "duplicate": "the same prompt is in an earlier row",
    "contradiction": "the same prompt is in an earlier row with another ground truth",
}


@dataclass(slots=True)
class Report:
    """The result of a check. A run uses duplicates; it skips rows with any other fault."""

    file: Path
    columns: tuple[str, ...]
    num_rows: int = 0
    faults: list[RowFault] = field(default_factory=list)
    roles: Counter[str] = field(default_factory=Counter)
    data_sources: Counter[str] = field(default_factory=Counter)
    prompt_lengths: list[int] = field(default_factory=list)
    """Length in tokens of every tokenised prompt; empty without a model."""
    num_trained: int | None = None
    """Number of rows whose prompts are in the training files; None if none are named."""

    @property
    def counts(self) -> Counter[str]:
        """Number of rows by fault."""
        return Counter(fault.reason for fault in self.faults)

    @property
    def num_usable(self) -> int:
        """Number of rows that a run would train on."""
        return self.num_rows - sum(
            number for reason, number in self.counts.items() if reason not in ("duplicate", "contradiction")
        )


def check_file(
    path: str | Path,
    model_path: str | None = None,
    max_prompt_tokens: int | None = None,
    chat_template: str = "",
    training: Sequence[Path] = (),
) -> Report:
    """Checks every row; with a model, also lengths; with training files, whether the prompts are in them. Raises
    DataError or ModelError if something cannot be read.
    """
    if max_prompt_tokens is not None and model_path is None:
        raise DataError("a limit of prompt tokens needs a model to count them with; add --model FOLDER")
    dataset = Dataset(path)
    encoder = ChatEncoder(model_path, chat_template) if model_path is not None else None
    report = Report(dataset.file, dataset.columns, len(dataset))
    seen: dict[str, tuple[int, str]] = {}
    for row in dataset:
        fault = _judge(row, report, seen)
        if fault is None and isinstance(row, Row) and encoder is not None:
            fault = _measure(row, report, encoder, max_prompt_tokens)
        if fault is not None:
            report.faults.append(fault)
    if training:
        prompts = [row.messages for row in dataset if isinstance(row, Row)]
        report.num_trained = num_shared({"": prompts}, training)[""]
    return report


def _judge(row: Row | RowFault, report: Report, seen: dict[str, tuple[int, str]]) -> RowFault | None:
    if isinstance(row, RowFault):
        return row
    report.roles.update(message["role"] for message in row.messages)
    report.data_sources[row.data_source] += 1
    prompt = json.dumps(row.messages, sort_keys=True, default=str)
    truth = json.dumps(row.ground_truth, sort_keys=True)
    first, first_truth = seen.setdefault(prompt, (row.index, truth))
    if first == row.index:
        return None
    if first_truth == truth:
        return RowFault(row.index, "duplicate", f"like row {first}")
    detail = f"like row {first}, whose ground truth is {first_truth:.60}, not {truth:.60}"
    return RowFault(row.index, "contradiction", detail)


def _measure(row: Row, report: Report, encoder: ChatEncoder, max_prompt_tokens: int | None) -> RowFault | None:
    try:
        length = len(encoder.encode(row.messages))
    except RefusedPromptError as refusal:
        return RowFault(row.index, "refused_by_template", str(refusal))
    report.prompt_lengths.append(length)
    if max_prompt_tokens is not None and length > max_prompt_tokens:
        return RowFault(row.index, "too_long", f"{length} tokens, at most {max_prompt_tokens}")
    return None


def show(report: Report, console: Console) -> int:
    """Prints the file, the first twenty faulty rows, and the totals. Returns 0 if every row is fine, else 1."""
    console.print(_overview(report))
    if report.faults:
        console.print(_rows(report))
        console.print(_summary(report))
    verdict = "every row is fine" if not report.faults else f"{len(report.faults)} faults"
    console.print(cell(f"{report.num_usable} of {report.num_rows} rows can be used; {verdict}"))
    return int(bool(report.faults))


def _overview(report: Report) -> Table:
    table = Table(title=cell(str(report.file)), title_justify="left", show_header=False)
    table.add_row("rows", str(report.num_rows))
    columns = (name if name in READ_COLUMNS else f"{name} (not read)" for name in report.columns)
    table.add_row("columns", cell(", ".join(columns)))
    absent = [name for name in COLUMNS if name not in report.columns]
    if absent:
        table.add_row("columns absent", ", ".join(absent))
    table.add_row("roles", cell(_counted(report.roles)))
    table.add_row("data sources", cell(_counted(report.data_sources)))
    if report.num_trained is not None:
        table.add_row("rows in the training data", str(report.num_trained))
    if report.prompt_lengths:
        lengths = sorted(report.prompt_lengths)
        middle, high = lengths[len(lengths) // 2], lengths[int(0.99 * (len(lengths) - 1))]
        table.add_row("prompt tokens", f"median {middle}, 99th percentile {high}, longest {lengths[-1]}")
    return table


def _rows(report: Report) -> Table:
    table = Table("row", "fault", "detail", title="faults", title_justify="left")
    for fault in report.faults[:_MOST_ROWS_SHOWN]:
        table.add_row(str(fault.index), fault.reason, cell(fault.detail))
    if len(report.faults) > _MOST_ROWS_SHOWN:
        table.add_row("…", "", f"and {len(report.faults) - _MOST_ROWS_SHOWN} more")
    return table


def _summary(report: Report) -> Table:
    table = Table("fault", "rows", "share", "meaning", title="summary", title_justify="left")
    for reason, number in report.counts.most_common():
        table.add_row(reason, str(number), f"{number / report.num_rows:.1%}", _EXPLAINED[reason])
    return table


def _counted(numbers: Counter[str]) -> str:
    return ", ".join(f"{name or '(none)'} {number}" for name, number in numbers.most_common(8)) or "-"
