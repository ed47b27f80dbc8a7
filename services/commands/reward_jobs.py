"""Implements the commands of `tandem reward` for durable jobs. Each returns its exit code (see docs/reward.md)."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import ExitStack
from pathlib import Path

from tandem.protos.errors import JobError, UserError
from tandem.services.clients import RewardClient
from tandem.services.clients.messages import Job
from tandem.services.command_line import print_error, print_text
from tandem.services.commands.reward_display import Faults, JobProgress, columns, counted, job_line, number, plain
from tandem.services.commands.reward_tasks import connect, print_lines
from tandem.services.data.completions import CompletionFile, Fields
from tandem.services.data.score_file import ScoreFile, check_out

_MOST_NAME_BYTES = 200  # limit of every service for a job's name


def submit_file(
    address: str,
    rubric: str,
    file: Path,
    fields: Fields,
    *,
    key: str,
    name: str,
    priority: int,
    watch: bool,
    out: Path | None,
    strict: bool,
) -> int:
    """Submits a file as a job and, with `watch` or `out`, waits for its end."""
    if out is not None:
        check_out(out, file)
    if str(file) == "-":
        raise UserError("a job needs a file that can be read again; write standard input to one first")
    completions = CompletionFile(file, fields)
    faults = Faults(completions)
    replies: list[str] = []
    with connect(address) as client:
        with JobProgress("submitting") as progress:

            def on_progress(job: Job) -> None:
                replies[1:] = [job.state]  # keeps the first and the last reply
                progress.show(job.num_items, completions.num_rows)

            try:
                job = client.submit(
                    completions,
                    rubric,
                    key=key or file_key(completions, rubric, priority),
                    name=name or _name_of(file),
                    priority=priority,
                    on_progress=on_progress,
                    on_fault=faults.tell,
                )
            except KeyboardInterrupt:
                print_error(f"{file} is not submitted as a whole; the same command goes on where this one was")
                raise
            except JobError as error:
                return _overtaken(error)
        faults.close()
        before = " (submitted before)" if replies[0] != "open" else ""
        print_text(f"job {job.job_id}{before}: {counted(job.num_items, 'item')}")
        if job.state == "expired":
            return _expired(job)
        if job.state == "cancelled":
            print_error(
                f"job {job.job_id} was cancelled; to score the file, `tandem reward delete {job.job_id}` and submit it "
                "again, or give another --key"
            )
        if not watch and out is None:
            print_text(f"its results: tandem reward results {job.job_id} --out scores.parquet")
            return int(job.state == "cancelled" or (strict and faults.number > 0))
        return _watch(client, job.job_id, out, strict)


def _name_of(file: Path) -> str:
    """The file's name as the name of a job: valid text, cut to the maximum length."""
    return file.name.encode(errors="replace")[:_MOST_NAME_BYTES].decode(errors="ignore")


def file_key(completions: CompletionFile, rubric: str, priority: int) -> str:
    """The idempotency key of a file. It depends on the file's bytes, the columns, the rubric and the priority."""
    words = json.dumps([completions.digest(), rubric, priority])
    return f"file-{hashlib.sha256(words.encode()).hexdigest()}"


def fetch_results(address: str, job_id: str, *, out: Path | None, strict: bool) -> int:
    """Waits for a job to end and writes its scores."""
    if out is not None:
        check_out(out)
    with connect(address) as client:
        return _watch(client, job_id, out, strict)


def _watch(client: RewardClient, job_id: str, out: Path | None, strict: bool) -> int:
    job: Job | None = None
    try:
        with ExitStack() as stack:
            written = stack.enter_context(ScoreFile(out)) if out is not None else None
            progress = stack.enter_context(JobProgress(f"job {job_id}:"))
            for event in client.watch(job_id, with_results=written is not None):
                if job is None and event.job.state == "open":
                    print_error(f"job {job_id} is open: it ends when its submission has ended, or is cancelled")
                job = event.job
                unscored = sum(job.num_unscored.values())
                progress.show(job.num_settled, job.num_items, f"{unscored:,} not scored" if unscored else "")
                if written is not None:
                    written.add(event.first_item, event.results)
            if written is not None and job is not None:
                written.finish(job.num_items)
    except KeyboardInterrupt:
        commands = f"watch it by `tandem reward results {job_id}`, end it by `tandem reward cancel {job_id}`"
        print_error(f"job {job_id} goes on; {commands}")
        raise
    except JobError as error:
        return _overtaken(error)
    assert job is not None, "a watched job has at least one event"
    print_text(job_line(job))
    if job.state == "expired" and out is None:
        return _expired(job)
    return int(job.state == "cancelled" or (strict and sum(job.num_unscored.values()) > 0))


def _overtaken(error: JobError) -> int:
    """Reports a job that was cancelled or whose results expired meanwhile. Raises any other error."""
    if type(error) is not JobError:
        raise error
    print_error(str(error))
    return 1


def _expired(job: Job) -> int:
    fault = f"the results of job {job.job_id} were given up for those of later jobs (limit max_result_bytes)"
    print_error(f"{fault}; to have them anew, `tandem reward delete {job.job_id}` and submit the file again")
    return 1


def list_jobs(address: str, limit: int, *, as_json: bool) -> int:
    with connect(address) as client:
        found = client.jobs(limit)
    if as_json:
        for job in found:
            print(json.dumps({name: getattr(job, name) for name in Job.__dataclass_fields__}))
        return 0
    head = ("job", "state", "items", "scored", "not scored", "waiting", "mean", "priority", "submitted", "name")
    rows = [
        [
            *(job.job_id, job.state, str(job.num_items), str(job.num_scored), str(sum(job.num_unscored.values()))),
            *(str(job.num_waiting), number(job.mean_value) if job.num_scored else "–", str(job.priority)),
            *(time.strftime("%Y-%m-%d %H:%M", time.localtime(job.created_at)), plain(job.name)),
        ]
        for job in found
    ]
    print_lines(columns(head, rows) if rows else ["no jobs; `tandem reward submit` makes one"])
    return 0


def end_job(address: str, job_id: str, *, delete: bool) -> int:
    """Cancels a job, or deletes one that has ended."""
    with connect(address) as client:
        print_text(f"deleted: {job_line(client.delete(job_id))}" if delete else job_line(client.cancel(job_id)))
    return 0
