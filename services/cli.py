"""The command `tandem`. Imports nothing heavy up here: `--help` answers at once, each command loads what it needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tandem.services.command_line import argument, command, console, option, read_secret_files, run_service_command
from tandem.services.commands.chaos import chaos_app
from tandem.services.commands.env import env_app
from tandem.services.commands.ledger import ledger_app
from tandem.services.commands.operate import operate_app
from tandem.services.commands.reward import reward_app
from tandem.services.commands.serve import LauncherName, Service
from tandem.services.rpc.tokens import Role, run_token

if TYPE_CHECKING:
    from tandem.services.config import Recipe

app = typer.Typer(
    name="tandem",
    help="Trains language models with reinforcement learning while they generate.\n\nStart with `tandem demo`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
data_app = typer.Typer(no_args_is_help=True, help="Checks datasets.\n\nExample: tandem data check data/train.parquet")
certs_app = typer.Typer(no_args_is_help=True, help="Makes TLS certificates.\n\nExample: tandem certs init certs")
app.add_typer(certs_app, name="certs")
app.add_typer(data_app, name="data")
app.add_typer(env_app, name="env")
app.add_typer(reward_app, name="reward")
app.add_typer(ledger_app)
app.add_typer(operate_app)
app.add_typer(chaos_app)


RecipeArgument = Annotated[Path, argument(metavar="RECIPE", help="A recipe (TOML), or the config.json of a run.")]
Overrides = Annotated[
    list[str] | None,
    argument(metavar="KEY=VALUE", help="Settings that override the recipe, e.g. trainer.learning_rate=2e-6."),
]
Launcher = Annotated[
    Literal["local", "ray"], typer.Option(help="Where services start: on this machine, or in a Ray cluster.")
]
RunArgument = Annotated[str | None, argument(metavar="RUN", help="A run folder. Default: the newest one under runs/.")]


@app.command(short_help="Build data and a tiny model, and watch it learn.")
@command
def demo(
    overrides: Overrides = None,
    task: Annotated[
        Literal["arithmetic", "guess_number"],
        typer.Option(help="What it learns: to add, or to play a game of several turns with an environment."),
    ] = "arithmetic",
    seed: Annotated[int, typer.Option(help="Seed of data, model and run.")] = 0,
    launcher: Launcher = "local",
) -> int:
    """Builds data and a tiny model, trains it with all services, and shows what it learned. Takes a few minutes and
    downloads nothing.

    Example: tandem demo --seed 1
    """
    from tandem.services.commands.demo import main

    return main(seed, overrides or [], task, launcher)


@app.command(short_help="Run a recipe with all its services.")
@command
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the recipe's run folder.")] = False,
    launcher: Launcher = "local",
) -> int:
    """Runs a recipe: feed, samplers, reward service and trainer, on this machine or on those of the Ray cluster at
    RAY_ADDRESS. Restarts services that die. Ctrl-C stops all of them.

    Example: tandem run examples/recipes/gsm8k.toml trainer.learning_rate=2e-6
    """
    from tandem.services.process import starting

    with starting():
        from tandem.services.launchers.supervisor import run_recipe

    return run_recipe(_load(recipe, overrides), resume, console=console(), launcher_name=launcher)


@app.command(short_help="Run one service of a run.")
def serve(
    service: Annotated[Service, argument(help="Which service.")],
    recipe: RecipeArgument,
    overrides: Overrides = None,
    replica: Annotated[
        int | None,
        option(min=0, help="Number of this replica. Default: the smallest that no other has."),
    ] = None,
    launcher: Annotated[
        LauncherName, typer.Option(help="What starts and stops replicas for the controller. none: you do.")
    ] = "none",
) -> None:
    """Runs one service in the foreground, on this or another machine. It uses the Redis of run.redis_url, of
    TANDEM_REDIS_URL, or of the supervisor in the recipe's run folder. Without a supervisor, services may start in any
    order; the feed creates the run.

    Example: tandem serve rollout runs/mine/config.json --replica 1
    """
    from tandem.services.commands.serve import serve_one

    run_service_command(lambda: serve_one(service, recipe, overrides or (), replica, launcher))


@app.command(short_help="Take a run over from its trainer.")
def takeover(
    run_folder: Annotated[Path, argument(metavar="RUN", help="The run folder.")], overrides: Overrides = None
) -> None:
    """Runs the trainer of a run here, in place of the one that runs now, perhaps on another machine. That one goes on
    until this one has loaded and checked everything that it needs. For runs without a supervisor.

    Example: tandem takeover runs/mine
    """
    from tandem.services.commands.serve import take_over
    from tandem.services.run.folder import find_run

    run_service_command(lambda: take_over(find_run(str(run_folder)), overrides or ()))


@app.command(short_help="Fine-tune a model before a run.")
@command
def sft(recipe: RecipeArgument, overrides: Overrides = None) -> int:
    """Fine-tunes a model on demonstrations, as the recipe's section [sft] says.

    Example: tandem sft recipe.toml sft.max_steps=500
    """
    loaded = _load(recipe, overrides)
    from tandem.services.commands.sft import main

    return main(loaded)


@app.command("eval", short_help="Measure a model's accuracy.")
@command
def evaluate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rescore: Annotated[str, option(metavar="SCORER", help="Score stored samples again.")] = "",
    output: Annotated[Path | None, option(metavar="FOLDER", help="Keep the samples there, and go on there.")] = None,
) -> int:
    """Answers the recipe's evaluation sets with its model and prints the metrics. With --rescore, scores the samples
    that a run or --output has stored with another scorer instead; RECIPE is the folder, or one of its files of samples.

    Example: tandem eval runs/demo/config.json model.path=runs/demo/hf
    """
    if rescore:
        from tandem.services.commands.rescore import score_stored_samples

        return score_stored_samples(recipe, rescore, overrides or ())
    loaded = _load(recipe, overrides)
    from tandem.services.commands.evaluate import evaluate_recipe

    return evaluate_recipe(loaded, output)


@app.command(short_help="Train a run's recorded batches again and compare.")
@command
def replay(
    run_folder: RunArgument = None,
    generation: Annotated[bool, option("--generation", help="Compare also what is sampled.")] = False,
) -> int:
    """Trains a finished run's recorded batches again and compares the weights, bit for bit. Exits 1 if they differ.

    Example: tandem replay runs/demo
    """
    from tandem.services.run.folder import find_run

    folder = find_run(run_folder)
    from tandem.services.commands.replay import main

    return main(folder, generation=generation)


@app.command(short_help="Propose how to split GPUs between trainer and samplers.")
@command
def plan(
    recipe: RecipeArgument,
    gpus: Annotated[int, option(min=2, help="GPUs to split.")],
    overrides: Overrides = None,
    measured: Annotated[str | None, option("--from", metavar="RUN", help="Folder of a run of the recipe.")] = None,
) -> int:
    """Proposes how to split GPUs between trainer ranks and samplers. It simulates the recipe with the rates of a run
    that was measured, which may be short and small.

    Example: tandem plan recipe.toml --gpus 64 --from runs/mine
    """
    from tandem.services.commands.plan import show_plan
    from tandem.services.run.folder import find_run

    folder = find_run(measured) if measured else None
    return show_plan(recipe, _load(recipe, overrides), gpus, folder, console())


@app.command(short_help="Print a token for the services of a run.")
@command
def token(
    run_folder: RunArgument = None,
    role: Annotated[Role, typer.Option(help="What the token allows; each role includes those before it.")] = Role.score,
) -> int:
    """Prints a token with which other programs may call the services of a run, e.g. its reward service.

    Example: TANDEM_TOKEN=$(tandem token runs/mine) tandem reward jobs --address 127.0.0.1:50051
    """
    from tandem.services.commands.status import ledger_of
    from tandem.services.run.folder import find_run

    with ledger_of(find_run(run_folder)) as buffer:
        print(run_token(buffer.secret(), role))
    return 0


@app.command(short_help="Write a run's charts and samples into one HTML file.")
@command
def report(
    run_folder: RunArgument = None,
    other: Annotated[str | None, argument(metavar="OTHER", help="A run folder to compare it with.")] = None,
    output: Annotated[Path | None, option(help="Default: report.html in the run folder.")] = None,
) -> int:
    """Writes one HTML file with a run's curves, timeline, idle times, staleness, samples and configuration. It opens
    without a network. With OTHER, both runs are in every chart.

    Example: tandem report runs/mine runs/other
    """
    from tandem.services.commands.report import write_report
    from tandem.services.run.folder import find_run

    print(write_report(find_run(run_folder), find_run(other) if other else None, output))
    return 0


@app.command(short_help="Show runs on a web page, and steer them.")
@command
def dashboard(
    runs: Annotated[
        list[str] | None, argument(metavar="RUN...", help="Run folders. Default: the newest one under runs/.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8470,
    name: Annotated[
        list[str] | None, option(metavar="NAME", help="Another host name under which browsers reach the page.")
    ] = None,
    certificates: Annotated[
        Path | None, option(metavar="FOLDER", help="Talk TLS, as service.crt of this folder of `tandem certs init`.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen on any --host without TLS.")] = False,
) -> int:
    """Serves a web page with the state of runs, their replicas, curves, samples, reward jobs and events. It is live
    while a run goes on. `tandem token RUN --role read` prints a token that may look, `--role operate` one that may
    also steer.

    Example: tandem dashboard runs/mine runs/other --port 8470
    """
    from tandem.services.commands.dashboard import show_dashboard

    return show_dashboard(
        runs or [], host=host, port=port, names=name or [], certificates=certificates, insecure=insecure
    )


@app.command(short_help="Check what this machine has and lacks.")
@command
def doctor() -> int:
    """Lists what this machine has and lacks, and the command that installs what is missing. Exits 1 if the demo cannot
    run.

    Example: tandem doctor
    """
    from tandem.services.commands.doctor import run_doctor

    return run_doctor(console())


@app.command(short_help="Ask whether a service serves.")
@command
def health(
    address: Annotated[
        str, typer.Argument(metavar="[ADDRESS]", help="host:port. Default: what TANDEM_ADDRESS_FILE holds.")
    ] = "",
    server_name: Annotated[
        str, option(help="Name that the certificate has to have. Default: the host of the address.")
    ] = "",
) -> int:
    """Asks a service's gRPC health service, as the probe of a container does. Needs no token; for a service of a run
    with certificates, TANDEM_CERTIFICATES names the folder of client.crt. Exits 1 if the service does not serve.

    Example: tandem health 127.0.0.1:50051
    """
    from tandem.services.commands.health import check_health

    print(check_health(address, server_name))
    return 0


@app.command(short_help="Print a recipe with all defaults.")
@command
def config(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A recipe; without one, every key is explained.")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, as a run saves it but for masked secrets.")
    ] = False,
) -> int:
    """Prints a recipe with every default filled in, passwords and keys masked, and marks what differs. Exits with 2 if
    a file, the model or the scorer it names cannot be used. Without a recipe: every key with its type and default.

    Example: tandem config recipe.toml run.staleness_budget=0
    """
    from tandem.services.config import dump_recipe, without_secrets
    from tandem.services.config.docs import as_toml, explained

    if recipe is None:
        for lines in explained():
            print(lines)
        return 0
    loaded = _load(recipe, overrides)
    shown = without_secrets(loaded)
    print(dump_recipe(shown) if as_json else as_toml(shown), end="", flush=True)
    from tandem.services.run.preflight import check_files

    check_files(loaded)
    return 0


@data_app.command("check", short_help="Check a dataset row by row.")
@command
def data_check(
    file: Annotated[Path, argument(metavar="FILE", help="A Parquet or JSON lines file in verl's or TRL's columns.")],
    model: Annotated[str | None, option(help="Model folder whose tokenizer counts the prompts' tokens.")] = None,
    max_prompt_tokens: Annotated[int | None, option(min=1, help="Longest prompt allowed; needs --model.")] = None,
    chat_template: Annotated[str, option(help="File with a Jinja chat template.")] = "",
    training: Annotated[list[Path] | None, option(help="Training file: counts the prompts that it has, too.")] = None,
) -> int:
    """Checks a dataset row by row: columns, roles, empty or too long prompts, duplicates, missing ground truth.

    Exits 1 if a row is faulty.

    Example: tandem data check data/train.parquet --model models/tiny --max-prompt-tokens 512
    """
    from tandem.services.commands.data_check import check_file, show

    limits = (max_prompt_tokens, chat_template, training or ())
    return show(check_file(file, model, *limits), console())


@certs_app.command("init", short_help="Make a CA and certificates of services and clients.")
@command
def certs_init(
    folder: Annotated[Path, argument(metavar="FOLDER", help="Where the files go. A CA that is there stays.")],
    hosts: Annotated[
        list[str] | None,
        argument(metavar="HOST", help="Names and IP addresses of the services, as clients know them."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the certificates are valid.")] = 365,
) -> int:
    """Makes a CA, and certificates for services and clients of a deployment. Again in the same folder: renews the
    certificates under the same CA, and adds the hosts. Services are always valid for localhost.

    Keep ca.key to yourself. A service needs ca.crt, service.crt, service.key; a client ca.crt, client.crt, client.key.

    Example: tandem certs init certs trainer.example.org 10.0.0.2
    """
    from tandem.services.commands.certs import write_certificates

    for line in write_certificates(folder, hosts or [], days):
        print(line)
    return 0


def _load(recipe: Path, overrides: list[str] | None) -> Recipe:
    from tandem.services.config import load_recipe

    return load_recipe(recipe, overrides or ())


def main() -> None:
    """Entry point of the `tandem` script."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise gRPC prints a line for every failed TLS handshake
    read_secret_files()
    app(prog_name="tandem")


if __name__ == "__main__":
    main()
