"""`tandem reward …`: scoring from the command line. Heavy imports are local, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.protos.errors import UserError
from tandem.services.addresses import ADDRESS_VARIABLE, DEFAULT_ADDRESS, DEFAULT_PORT
from tandem.services.command_line import argument, command, option, run_service_command
from tandem.services.rpc.tokens import Role, add_token

reward_app = typer.Typer(
    no_args_is_help=True,
    help="Scores completions at once, or in durable jobs. See docs/reward.md.\n\n"
    "Exit codes: 0 done; 1 the service failed or cannot be reached, a job was "
    "cancelled, or with --strict something has no score; "
    "2 bad input; 130 Ctrl-C.\n\n"
    "Example: tandem reward score answers.jsonl --scorer exact",
)

_COMPLETIONS = (
    "Parquet or JSON lines in verl's columns, with the completions in a column `solution`, `response` or `completion`"
)
Address = Annotated[
    str,
    option(
        metavar="HOST:PORT",
        help="Where the service is; several replicas with commas. Default: "
        f"{ADDRESS_VARIABLE}, else {DEFAULT_ADDRESS}.",
    ),
]
RubricFile = Annotated[
    Path | None, option(metavar="FILE", help="How to score (TOML). Default: as the service is set up.")
]
Scorer = Annotated[
    str, option(metavar="NAME", help="One scorer in place of a rubric; `tandem reward scorers` lists them.")
]
Arguments = Annotated[
    list[str] | None, option("--argument", metavar="NAME=VALUE", help="A parameter of --scorer, e.g. tolerance=0.01.")
]
Column = Annotated[str, option(metavar="NAME", help="Column with the completions, if it has another name.")]
GroupColumn = Annotated[
    str, typer.Option(metavar="NAME", help="Column that says which rows are compared with one another.")
]
WithPrompt = Annotated[
    bool,
    typer.Option(
        "--with-prompt", help="Send the column `prompt` too, as extra_info.prompt: for judges and reward models."
    ),
]
Out = Annotated[
    Path | None, option(metavar="FILE", help="Write the scores there (.parquet or .jsonl), in the order of the rows.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if anything has no score.")]
Certificates = Annotated[
    Path | None,
    option(metavar="FOLDER", help="Talk TLS, as service.crt of this folder, which `tandem certs init` writes."),
]
ClientCertificates = Annotated[
    bool, typer.Option("--client-certificates", help="Refuse callers without a certificate of the folder's CA.")
]
MetricsPort = Annotated[
    int,
    typer.Option(
        envvar="TANDEM_METRICS_PORT",
        show_envvar=False,
        min=0,
        max=65535,
        help="Answer Prometheus on this port. Default: TANDEM_METRICS_PORT, else no port.",
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen on any --host, although TLS or tokens are missing.")]
JobId = Annotated[str, argument(metavar="ID", help="A job, as `tandem reward jobs` lists it.")]


@reward_app.command("score", short_help="Score a small file, or one completion, at once.")
@command
def score(
    file: Annotated[
        str | None, argument(metavar="FILE|-", help=f"{_COMPLETIONS}; - reads JSON lines from standard input.")
    ] = None,
    rubric: RubricFile = None,
    scorer: Scorer = "",
    arguments: Arguments = None,
    solution: Annotated[str | None, option(metavar="TEXT", help="A single completion, in place of a file.")] = None,
    ground_truth: Annotated[str | None, option(metavar="TEXT", help="Its ground truth.")] = None,
    data_source: Annotated[str, option(metavar="NAME", help="Its data source.")] = "",
    extra_info: Annotated[str, option(metavar="JSON", help="Its extra_info, an object.")] = "",
    column: Column = "",
    group_column: GroupColumn = "group",
    with_prompt: WithPrompt = False,
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    strict: Strict = False,
    address: Address = "",
) -> int:
    """Scores a file of up to 10,000 rows, or a single completion: prints one line a row, then a summary.

    A row that cannot be scored is printed with the reason.

    Example: tandem reward score answers.jsonl --rubric examples/rubrics/gsm8k.toml
    """
    from tandem.services.commands.reward_tasks import items_of_file, rubric_text, score_now, single_completion
    from tandem.services.data.completions import Fields
    from tandem.services.data.score_file import check_out

    if file is not None and solution is not None:
        raise UserError(f"--solution is a completion of its own; leave out {file}, or --solution")
    if out is not None:
        check_out(out, Path(file or ""))
    text = rubric_text(rubric, scorer, arguments)
    if solution is not None:
        items = single_completion(solution, ground_truth, data_source, extra_info)
    elif file is not None:
        items = items_of_file(file, Fields(column, group_column, with_prompt))
    else:
        raise UserError("name a FILE to score (- for standard input), or give --solution")
    return score_now(address, text, items, out=out, as_json=as_json, strict=strict)


@reward_app.command("submit", short_help="Submit a file of any size as a job.")
@command
def submit(
    file: Annotated[Path, argument(metavar="FILE", help=f"{_COMPLETIONS}.")],
    rubric: RubricFile = None,
    scorer: Scorer = "",
    arguments: Arguments = None,
    watch: Annotated[bool, typer.Option("--watch", help="Wait until the job has ended.")] = False,
    out: Out = None,
    key: Annotated[
        str,
        option(
            metavar="KEY", help="The same key always means the same job. Default: a digest of file, columns and rubric."
        ),
    ] = "",
    name: Annotated[str, option(metavar="TEXT", help="Shown in lists of jobs. Default: the file's name.")] = "",
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Higher is scored first.")] = 0,
    column: Column = "",
    group_column: GroupColumn = "group",
    with_prompt: WithPrompt = False,
    strict: Strict = False,
    address: Address = "",
) -> int:
    """Submits a file as a durable job: it is scored even if this command, a service or Redis restarts.

    The same file with the same rubric is the same job: repeat an interrupted submission to continue it. --out implies
    --watch.

    Example: tandem reward submit answers.parquet --rubric examples/rubrics/gsm8k.toml --watch
    """
    from tandem.services.commands.reward_jobs import submit_file
    from tandem.services.commands.reward_tasks import rubric_text
    from tandem.services.data.completions import Fields

    text, fields = rubric_text(rubric, scorer, arguments), Fields(column, group_column, with_prompt)
    return submit_file(
        address, text, file, fields, key=key, name=name, priority=priority, watch=watch, out=out, strict=strict
    )


@reward_app.command("jobs", short_help="List the newest jobs.")
@command
def jobs(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    address: Address = "",
) -> int:
    """Lists the newest jobs, newest first.

    Example: tandem reward jobs --limit 5
    """
    from tandem.services.commands.reward_jobs import list_jobs

    return list_jobs(address, limit, as_json=as_json)


@reward_app.command("results", short_help="Fetch a job's scores.")
@command
def results(job_id: JobId, out: Out = None, strict: Strict = False, address: Address = "") -> int:
    """Waits until a job has ended and prints a summary. With --out, writes the score of every row to a file.

    Columns: index (the row, from 0), value, reason, detail, and one for each part of the breakdown.

    Example: tandem reward results 5f2b64cd5b8c4e0fa1a8d0c4ff9b3a11 --out scores.parquet
    """
    from tandem.services.commands.reward_jobs import fetch_results

    return fetch_results(address, job_id, out=out, strict=strict)


@reward_app.command("cancel", short_help="Cancel a job.")
@command
def cancel(job_id: JobId, address: Address = "") -> int:
    """Cancels a job. Its scores stay, the remaining items count as cancelled. A job that has ended does not change.

    Example: tandem reward cancel 5f2b64cd5b8c4e0fa1a8d0c4ff9b3a11
    """
    from tandem.services.commands.reward_jobs import end_job

    return end_job(address, job_id, delete=False)


@reward_app.command("delete", short_help="Delete a job and its scores.")
@command
def delete(job_id: JobId, address: Address = "") -> int:
    """Deletes a job that has ended, with its scores and its key, so that the same file can be submitted again.

    Example: tandem reward delete 5f2b64cd5b8c4e0fa1a8d0c4ff9b3a11
    """
    from tandem.services.commands.reward_jobs import end_job

    return end_job(address, job_id, delete=True)


@reward_app.command("scorers", short_help="List scorers and their parameters.")
@command
def scorers(
    name: Annotated[str | None, argument(metavar="NAME", help="One of them, with its parameters.")] = None,
    address: Address = "",
) -> int:
    """Lists the scorers that a rubric may name and the service's limits, or the parameters of one scorer.

    Example: tandem reward scorers numeric
    """
    from tandem.services.commands.reward_tasks import list_scorers

    return list_scorers(address, name)


@reward_app.command("serve", short_help="Run the service on its own.")
def serve(
    arguments: Annotated[
        list[str] | None,
        argument(
            metavar="CONFIG|KEY=VALUE",
            help="TOML with the sections [reward] and [jobs]; settings that override "
            "the file, e.g. reward.num_workers=4.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, option(min=0, max=65535, help=f"0 picks a free one. Default: reward.port, else {DEFAULT_PORT}.")
    ] = None,
    redis_url: Annotated[
        str,
        option(
            envvar="TANDEM_REDIS_URL",
            show_envvar=False,
            metavar="URL",
            help="Redis that keeps the jobs. Default: TANDEM_REDIS_URL, else an embedded one.",
        ),
    ] = "",
    folder: Annotated[Path, typer.Option(help="Where the embedded Redis keeps the jobs.")] = Path("runs/reward"),
    name: Annotated[
        str,
        option(help="Of this replica: started anew under it, it goes on with what it held. Default: machine and port."),
    ] = "",
    token_file: Annotated[
        Path | None,
        option(metavar="FILE", help="Refuse callers without a token of this file, which `tandem reward token` writes."),
    ] = None,
    certificates: Certificates = None,
    client_certificates: ClientCertificates = False,
    insecure: Insecure = False,
    metrics_port: MetricsPort = 0,
) -> None:
    """Runs the reward service alone, until Ctrl-C. Services with the same Redis and jobs.namespace are replicas.

    Example: tandem reward serve --port 50051 reward.num_workers=4
    """

    def work() -> None:
        from tandem.services.commands.reward_tasks import serve_alone

        serve_alone(
            arguments or [],
            host=host,
            port=port,
            redis_url=redis_url,
            folder=folder,
            name=name,
            token_file=token_file,
            certificates=certificates,
            client_certificates=client_certificates,
            insecure=insecure,
            metrics_port=metrics_port,
        )

    run_service_command(work)


@reward_app.command("token", short_help="Make a token for a caller.")
@command
def token(
    file: Annotated[Path, argument(metavar="FILE", help="The service's token file; is created if it is missing.")],
    name: Annotated[str, argument(metavar="NAME", help="Who gets the token.")],
    role: Annotated[Role, typer.Option(help="What the token allows; each role includes those before it.")] = Role.score,
) -> int:
    """Makes a token, prints it once, and adds its SHA-256 to the file of `tandem reward serve --token-file`.

    Example: tandem reward token tokens.toml alice
    """
    print(add_token(file, name, role))
    return 0
