"""Implements the commands of `tandem reward`. Each returns its exit code; docs/reward.md lists the codes."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.error_text import nearest
from tandem.protos.errors import JobError, ScorerError, UserError
from tandem.services.addresses import DEFAULT_PORT, check_listening, named_addresses
from tandem.services.clients import RewardClient
from tandem.services.clients.messages import Job
from tandem.services.command_line import print_error
from tandem.services.commands.reward_display import (
    Faults,
    JobProgress,
    columns,
    counted,
    job_line,
    moment,
    number,
    plain,
    score_line,
    sum_line,
)
from tandem.services.data.completions import CompletionFile, Fields
from tandem.services.data.score_file import ScoreFile, check_out, row_of

MOST_ROWS_AT_ONCE = 10_000
"""Maximum number of rows for `tandem reward score`. Larger files are submitted as jobs."""
_MOST_NAME_BYTES = 200  # limit of every service for a job's name


@dataclass(frozen=True, slots=True)
class Choice:
    """The service to use and how it scores."""

    address: str = ""
    rubric: Path | None = None
    scorer: str = ""
    arguments: tuple[str, ...] = ()

    def text(self) -> str:
        """The rubric as TOML; empty for the service's default.

        Raises:
            UserError: the file cannot be read, or the options contradict one another.
        """
        if self.rubric is not None:
            if self.scorer or self.arguments:
                raise UserError("--rubric and --scorer exclude one another; a rubric's file has its scorers' arguments")
            return _read_rubric(self.rubric)
        if not self.scorer:
            if self.arguments:
                raise UserError(f"--argument {self.arguments[0]} needs --scorer: which scorer is it for?")
            return ""
        lines = ["[[components]]", f"scorer = {json.dumps(self.scorer)}"]
        if self.arguments:
            lines += ["[components.arguments]", *map(_argument, self.arguments)]
        return "\n".join(lines) + "\n"


def _read_rubric(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ScorerError(f"rubric {file} is not text; a rubric is a TOML file") from None
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise ScorerError(f"rubric {file}: {reason}; see examples/rubrics for some to start from") from None


def _argument(text: str) -> str:
    """`name=value` as a line of TOML. A value that is not valid TOML becomes a string."""
    name, sign, value = text.partition("=")
    if not sign or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise UserError(f"--argument {text!r}: write NAME=VALUE, e.g. tolerance=0.01")
    try:
        if list(tomllib.loads(f"v = {value}")) == ["v"]:
            return f"{name} = {value}"
    except tomllib.TOMLDecodeError:
        pass
    return f"{name} = {json.dumps(value)}"


def _connect(address: str) -> RewardClient:
    """Connects to the service. Raises UnavailableError immediately if none of its addresses answers."""
    check_listening(named_addresses(address))
    return RewardClient(address)


def score_single(
    choice: Choice,
    file: str | None,
    solution: str,
    ground_truth: str | None,
    data_source: str,
    extra_info: str,
    *,
    as_json: bool,
    strict: bool,
) -> int:
    """Scores one completion."""
    if file is not None:
        raise UserError(f"--solution is a completion of its own; leave out {file}, or --solution")
    try:
        extra = json.loads(extra_info) if extra_info else {}
    except ValueError as error:
        raise UserError(f"--extra-info is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise UserError(f"--extra-info is {extra_info!r:.80}, not a JSON object")
    return _score_now(choice, [ScoreItem(data_source, solution, ground_truth, extra)], None, as_json, strict)


def score_file(
    choice: Choice, file: str | None, fields: Fields, *, out: Path | None, as_json: bool, strict: bool
) -> int:
    """Scores a small file without a job."""
    if file is None:
        raise UserError("name a FILE to score (- for standard input), or give --solution")
    if out is not None:
        check_out(out, Path(file))
    text = choice.text()
    completions = CompletionFile(file, fields)
    items = list(islice(completions, MOST_ROWS_AT_ONCE + 1))
    if len(items) > MOST_ROWS_AT_ONCE:
        raise UserError(
            f"{completions.name} has more than {MOST_ROWS_AT_ONCE:,} rows; `tandem reward submit` takes any number"
        )
    teller = Faults(completions)
    for index, item in enumerate(items):
        if isinstance(item, Unscored):
            teller.tell(index, item)
    teller.close()
    return _score_now(choice, items, out, as_json, strict, text)


def _score_now(
    choice: Choice,
    items: Sequence[ScoreItem | Unscored],
    out: Path | None,
    as_json: bool,
    strict: bool,
    text: str | None = None,
) -> int:
    with _connect(choice.address) as client:
        rubric = choice.text() if text is None else text
        scores = client.score(items, rubric)
        scored_by = "" if rubric or as_json else f"; scorer: {_default_of(client)} (the service's default)"
    if out is not None:
        with ScoreFile(out) as written:
            written.add(0, scores)
            written.finish()
    else:
        for index, score in enumerate(scores):
            print(json.dumps(row_of(index, score)) if as_json else score_line(index, score))
    if not as_json:
        print(_sum_of(scores) + scored_by)
    return int(strict and not all(isinstance(score, Scored) for score in scores))


def _default_of(client: RewardClient) -> str:
    """The names of the scorers in the service's default rubric."""
    components = tomllib.loads(client.scorers().default_rubric).get("components", [])
    return ", ".join(str(component.get("scorer")) for component in components) or "its rubric"


def _sum_of(scores: Sequence[Score]) -> str:
    values = [score.value for score in scores if isinstance(score, Scored)]
    reasons = Counter(str(score.reason) for score in scores if isinstance(score, Unscored))
    return sum_line(len(values), sum(values) / len(values) if values else 0.0, reasons)


def submit_file(
    choice: Choice,
    file: Path,
    fields: Fields,
    console: Console,
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
    text = choice.text()
    completions = CompletionFile(file, fields)
    faults = Faults(completions)
    replies: list[str] = []
    with _connect(choice.address) as client:
        with JobProgress(console, "submitting") as progress:

            def on_progress(job: Job) -> None:
                replies[1:] = [job.state]  # keeps the first and the last reply
                progress.show(job.num_items, completions.num_rows)

            try:
                job = client.submit(
                    completions,
                    text,
                    key=key or file_key(completions, text, priority),
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
        print(f"job {job.job_id}{before}: {counted(job.num_items, 'item')}", flush=True)
        if job.state == "expired":
            return _expired(job)
        if job.state == "cancelled":
            print_error(
                f"job {job.job_id} was cancelled; to score the file, `tandem reward "
                f"delete {job.job_id}` and submit it again, "
                "or give another --key"
            )
        if not watch and out is None:
            print(f"its results: tandem reward results {job.job_id} --out scores.parquet")
            return int(job.state == "cancelled" or (strict and faults.number > 0))
        return _watch(client, job.job_id, console, out, strict)


def _name_of(file: Path) -> str:
    """The file's name as the name of a job: valid text, cut to the maximum length."""
    return file.name.encode(errors="replace")[:_MOST_NAME_BYTES].decode(errors="ignore")


def file_key(completions: CompletionFile, rubric: str, priority: int) -> str:
    """The idempotency key of a file. It depends on the file's bytes, the columns, the rubric and the priority."""
    words = json.dumps([completions.digest(), rubric, priority])
    return f"file-{hashlib.sha256(words.encode()).hexdigest()}"


def fetch_results(address: str, job_id: str, console: Console, *, out: Path | None, strict: bool) -> int:
    """Waits for a job to end and writes its scores."""
    if out is not None:
        check_out(out)
    with _connect(address) as client:
        return _watch(client, job_id, console, out, strict)


def _watch(client: RewardClient, job_id: str, console: Console, out: Path | None, strict: bool) -> int:
    job: Job | None = None
    try:
        with ExitStack() as stack:
            written = stack.enter_context(ScoreFile(out)) if out is not None else None
            progress = stack.enter_context(JobProgress(console, f"job {job_id}:"))
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
        print_error(
            f"job {job_id} goes on; watch it by `tandem reward results {job_id}`, "
            f"end it by `tandem reward cancel {job_id}`"
        )
        raise
    except JobError as error:
        return _overtaken(error)
    assert job is not None, "a watched job has at least one event"
    print(job_line(job))
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
    """Reports that the results of the job have expired."""
    print_error(
        f"the results of job {job.job_id} were given up for those of later jobs "
        "(limit max_result_bytes); to have them anew, "
        f"`tandem reward delete {job.job_id}` and submit the file again"
    )
    return 1


def list_jobs(address: str, limit: int, *, as_json: bool) -> int:
    """Prints the newest jobs."""
    with _connect(address) as client:
        found = client.jobs(limit)
    if as_json:
        for job in found:
            print(json.dumps({name: getattr(job, name) for name in Job.__dataclass_fields__}))
        return 0
    head = ("job", "state", "items", "scored", "not scored", "waiting", "mean", "priority", "submitted", "name")
    rows = [
        (
            job.job_id,
            job.state,
            str(job.num_items),
            str(job.num_scored),
            str(sum(job.num_unscored.values())),
            str(job.num_waiting),
            number(job.mean_value) if job.num_scored else "–",
            str(job.priority),
            moment(job.created_at),
            plain(job.name),
        )
        for job in found
    ]
    _print_lines(columns(head, rows) if rows else ["no jobs; `tandem reward submit` makes one"])
    return 0


def cancel_job(address: str, job_id: str) -> int:
    """Cancels a job, or reports that it had already ended."""
    with _connect(address) as client:
        print(job_line(client.cancel(job_id)))
    return 0


def delete_job(address: str, job_id: str) -> int:
    """Deletes a job that has ended."""
    with _connect(address) as client:
        print(f"deleted: {job_line(client.delete(job_id))}")
    return 0


def list_scorers(address: str, name: str | None) -> int:
    """Prints the list of scorers, or the parameters of one scorer."""
    with _connect(address) as client:
        told = client.scorers()
    if name is None:
        rows = [(one.name, one.version or "–", one.isolation, one.summary) for one in told.scorers]
        _print_lines(columns(("scorer", "version", "runs", "what it does"), rows))
        _print_lines(["", "limits: " + ", ".join(f"{key} {number(told.limits[key])}" for key in sorted(told.limits))])
        return 0
    found = next((one for one in told.scorers if one.name == name), None)
    if found is None:
        names = [one.name for one in told.scorers]
        near = nearest(name, names)
        raise ScorerError(
            f"there is no scorer {name!r}; " + (f"did you mean {near}?" if near else f"there are {', '.join(names)}")
        )
    print(f"{found.name}, version {found.version or '–'}, runs {found.isolation}: {found.summary}")
    rows4 = [(p.name, p.type, p.default or "must be given", p.description) for p in found.parameters]
    _print_lines(columns(("parameter", "type", "default", "meaning"), rows4) if rows4 else ["it has no parameters"])
    return 0


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line.rstrip())


def serve_alone(
    arguments: Sequence[str], *, host: str, port: int | None, redis_url: str, folder: Path, name: str
) -> None:
    """Runs a standalone service until it is stopped.

    Raises:
        UserError: the configuration, a scorer, the port or Redis cannot be used.
    """
    from tandem.services.config import load_service_config
    from tandem.services.process import starting

    files = [one for one in arguments if "=" not in one]
    if len(files) > 1:
        raise UserError(f"{files[1]!r} is a second configuration; write settings as section.key=value")
    config = load_service_config(files[0] if files else None, [one for one in arguments if "=" in one])
    chosen = port if port is not None else config.reward.port or DEFAULT_PORT
    reward = config.reward.model_copy(update={"port": chosen})
    with starting():
        from tandem.services.reward import standalone as reward_standalone
    reward_standalone.main(
        config.model_copy(update={"reward": reward}), host=host, redis_url=redis_url, folder=folder, name=name
    )
