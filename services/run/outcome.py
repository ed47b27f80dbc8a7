"""Reports the end of a run: what was trained, where the results are, how to resume, and the exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.run.folder import CONFIG_FILE, HF_FOLDER, SUMMARY_FILE, resume_command, step_taken
from tandem.services.run.process_group import FAILED, FINISHED, INCOMPLETE


def report_outcome(recipe: Recipe, buffer: Buffer, outcome: int, step: int, report: Callable[[str], None]) -> int:
    """Reports the end of a run after `step` batches. Returns its exit code. Removes a run that trained no batch."""
    folder = recipe.folder
    if outcome == FINISHED:
        outcome = _verify(buffer, report)
        if outcome == FINISHED and step < recipe.run.total_batches:
            report(early_end(recipe, step, buffer.counts()))
            outcome = FINISHED if recipe.data.max_epochs else INCOMPLETE
        report(f"summary: {folder / SUMMARY_FILE} · trained model: {folder / HF_FOLDER}")
    elif step_taken(folder):
        report(f"{step} of {recipe.run.total_batches} batches are trained; go on with: {resume_command(folder)}")
    else:
        forget_run(recipe, buffer)
        report(f"no batch was trained; {folder} can be used for a new run")
    return outcome


def early_end(recipe: Recipe, step: int, counts: Mapping[str, int]) -> str:
    """Says why a finished run trained fewer batches than `run.total_batches`, and what happened to its groups."""
    epochs, admitted, dropped = recipe.data.max_epochs, counts["admitted"], counts["dropped"]
    why = "no further group could be scored"
    if epochs:
        why = f"the training data ended after {epochs} epoch{'s' if epochs > 1 else ''} (data.max_epochs={epochs})"
    groups = f"Of {admitted} groups, {admitted - dropped} were trained and {dropped} dropped"
    reasons = f" ({drop_reasons(counts)})" if dropped else ""
    return f"trained {step} of {recipe.run.total_batches} batches: {why}. {groups}{reasons}"


def drop_reasons(counts: Mapping[str, int]) -> str:
    """`crashed 3, zero_variance 1` from the counts of a ledger, the most frequent reason first; "" without drops."""
    found = {name.removeprefix("dropped:"): number for name, number in counts.items() if name.startswith("dropped:")}
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {number}" for reason, number in ordered if number)


def forget_run(recipe: Recipe, buffer: Buffer) -> None:
    """Removes a run that trained no batch from Redis and from its folder. Its logs stay."""
    try:
        buffer.delete()
    except TandemError:
        return  # Redis is gone; config.json stays, so that the folder still shows its run
    for name in (CONFIG_FILE, "evaluations.jsonl"):
        (recipe.folder / name).unlink(missing_ok=True)


def _verify(buffer: Buffer, report: Callable[[str], None]) -> int:
    """FAILED if the counts in a finished run's ledger do not add up, else FINISHED."""
    try:
        violations = buffer.verify()
    except TandemError as error:
        report(f"the ledger of the finished run could not be checked: {error}")
        return FAILED
    for violation in violations:
        report(f"ledger: {violation}")
    return FAILED if violations else FINISHED
