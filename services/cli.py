"""The command `tandem`. Imports nothing heavy up here: `--help` answers at once, each command loads what it needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tandem.services.command_line import argument, command, console, full_disk_named, option, run_service_command
from tandem.services.commands.reward import reward_app
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
app.add_typer(reward_app, name="reward")


Service = Literal["feed", "rollout", "reward", "trainer"]
RecipeArgument = Annotated[Path, argument(metavar="RECIPE", help="A recipe (TOML), or the config.json of a run.")]
Overrides = Annotated[
    list[str] | None,
    argument(metavar="KEY=VALUE", help="Settings that override the recipe, e.g. trainer.learning_rate=2e-6."),
]
RunArgument = Annotated[str | None, argument(metavar="RUN", help="A run folder. Default: the newest one under runs/.")]


@app.command(short_help="Build data and a tiny model, and watch it learn.")
@command
def demo(
    overrides: Overrides = None, seed: Annotated[int, typer.Option(help="Seed of data, model and run.")] = 0
) -> int:
    """Builds data and a tiny model, trains it with all services, and shows what it learned. Takes a few minutes and
    downloads nothing.

    Example: tandem demo --seed 1
    """
    from tandem.services.commands.demo import main

    return main(seed, overrides or [])


@app.command(short_help="Run a recipe on this machine.")
@command
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the recipe's run folder.")] = False,
) -> int:
    """Runs a recipe on this machine: feed, samplers, reward service and trainer. Restarts services that die. Ctrl-C
    stops all of them.

    Example: tandem run examples/recipes/gsm8k.toml trainer.learning_rate=2e-6
    """
    from tandem.services.run.supervisor import run_recipe

    return run_recipe(_load(recipe, overrides), resume, console=console())


@app.command(short_help="Run one service of a run.")
def serve(
    service: Annotated[Service, argument(help="Which service.")],
    recipe: RecipeArgument,
    overrides: Overrides = None,
    replica: Annotated[int, typer.Option(min=0, help="Number of this sampler, from 0.")] = 0,
) -> None:
    """Runs one service in the foreground, on this or another machine. It uses the Redis of run.redis_url, of
    TANDEM_REDIS_URL, or of the supervisor in the recipe's run folder. Without a supervisor, services may start in any
    order; the feed creates the run.

    Example: tandem serve rollout runs/mine/config.json --replica 1
    """
    from tandem.services.process import die_with_parent

    supervisor = os.environ.get("TANDEM_PARENT_PID")
    if supervisor is not None:
        die_with_parent(int(supervisor))

    def work() -> None:
        from tandem.protos.child_environment import drop_secrets
        from tandem.services.logging_setup import configure_logging
        from tandem.services.run.folder import redis_url_of

        loaded = _load(recipe, overrides)
        configure_logging(service, run=loaded.run.run_id, replica=replica if service == "rollout" else None)
        if supervisor is not None:
            redis_url = os.environ["TANDEM_REDIS_URL"]
        else:
            from tandem.services.run.ledger import join_run
            from tandem.services.run.preflight import check_service

            check_service(loaded, service, replica)
            redis_url = redis_url_of(loaded)
            join_run(loaded, redis_url, service)
        if service == "rollout":
            drop_secrets()  # it has read them; its engine's processes need none
        with full_disk_named(loaded.folder):
            _serve(service, loaded, redis_url, replica, [str(recipe), *(overrides or ())])

    run_service_command(work)


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
def evaluate(recipe: RecipeArgument, overrides: Overrides = None) -> int:
    """Answers the recipe's evaluation file greedily with its model and prints the accuracy.

    Example: tandem eval runs/demo/config.json model.path=runs/demo/hf
    """
    loaded = _load(recipe, overrides)
    from tandem.services.commands.evaluate import evaluate_recipe

    return evaluate_recipe(loaded)


@app.command(short_help="Train a run's recorded batches again and compare.")
@command
def replay(run_folder: RunArgument = None) -> int:
    """Trains a finished run's recorded batches again and compares the weights, bit for bit. Exits 1 if they differ.

    Example: tandem replay runs/demo
    """
    from tandem.services.run.folder import find_run

    folder = find_run(run_folder)
    from tandem.services.commands.replay import main

    return main(folder)


@app.command(short_help="Show what a run is doing, or did.")
@command
def status(run_folder: RunArgument = None) -> int:
    """Shows the services of a running run and where its groups are; of a finished one, its summary.

    Example: tandem status runs/demo
    """
    from tandem.services.commands.status import show_status
    from tandem.services.run.folder import find_run

    return show_status(find_run(run_folder), console())


@app.command(short_help="Change the number of a running run's samplers.")
@command
def scale(
    run_folder: Annotated[str, argument(metavar="RUN", help="The folder of a run that is running.")],
    wanted: Annotated[str, argument(metavar="rollout=COUNT", help="The service and its number of replicas.")],
) -> int:
    """Changes the number of samplers of a running run. A further one joins once its engine has started and has the
    current weights. One that is no longer wanted finishes its groups first.

    Example: tandem scale runs/mine rollout=2
    """
    from tandem.services.commands.status import scale_service
    from tandem.services.run.folder import find_run

    return scale_service(find_run(run_folder), wanted, console())


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


@app.command(short_help="Check that no group of a run was lost.")
@command
def ledger(
    run_folder: RunArgument = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> int:
    """Counts a run's groups in every state and checks that none was lost or counted twice. Exits 1 if one was.

    Works while the run goes on, and afterwards. Example: tandem ledger runs/demo
    """
    from tandem.services.commands.status import show_ledger
    from tandem.services.run.folder import find_run

    return show_ledger(find_run(run_folder), console(), as_json=as_json)


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


@app.command(short_help="Check what this machine has and lacks.")
@command
def doctor() -> int:
    """Lists what this machine has and lacks, and the command that installs what is missing. Exits 1 if the demo cannot
    run.

    Example: tandem doctor
    """
    from tandem.services.commands.doctor import run_doctor

    return run_doctor(console())


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
) -> int:
    """Checks a dataset row by row: columns, roles, empty or too long prompts, duplicates, missing ground truth.

    Exits 1 if a row is faulty.

    Example: tandem data check data/train.parquet --model models/tiny --max-prompt-tokens 512
    """
    from tandem.services.commands.data_check import check_file, show

    report = check_file(file, model_path=model, max_prompt_tokens=max_prompt_tokens, chat_template=chat_template)
    return show(report, console())


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

    Keep ca.key to yourself. A service needs ca.crt, service.crt and service.key; a client ca.crt, client.crt and
    client.key.

    Example: tandem certs init certs trainer.example.org 10.0.0.2
    """
    from tandem.services.commands.certs import write_certificates

    for line in write_certificates(folder, hosts or [], days):
        print(line)
    return 0


def _serve(service: Service, recipe: Recipe, redis_url: str, replica: int, recipe_arguments: list[str]) -> None:
    from tandem.services.process import starting

    if service == "feed":
        with starting():
            from tandem.services import feed_service

        feed_service.main(recipe, redis_url)
    elif service == "rollout":
        with starting():
            from tandem.services.rollout import service as rollout_service

        rollout_service.main(recipe, redis_url, replica)
    elif service == "reward":
        with starting():
            from tandem.services.reward import service as reward_service

        reward_service.main(recipe, redis_url)
    else:
        from tandem.services.trainer.launch import run_trainer

        run_trainer(recipe, redis_url, recipe_arguments)


def _load(recipe: Path, overrides: list[str] | None) -> Recipe:
    from tandem.services.config import load_recipe

    return load_recipe(recipe, overrides or ())


def main() -> None:
    """Entry point of the `tandem` script."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise gRPC prints a line for every failed TLS handshake
    app(prog_name="tandem")


if __name__ == "__main__":
    main()
