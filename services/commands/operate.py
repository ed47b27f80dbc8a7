"""`tandem status`, `scale`, `pause`, `resume`, `drain`, `checkpoint` and `stop`: calls of a run's controller.

Imports nothing heavy up here, for `--help` loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tandem.services.command_line import argument, command, console, option, print_line

if TYPE_CHECKING:
    from tandem.services.commands.find_controller import ControllerPlace

operate_app = typer.Typer()

_SECONDS = 100.0  # the launcher may have to start containers
_MOST_REPLICAS = 10_000  # fits into the message; a machine holds far fewer

RunArgument = Annotated[str | None, argument(metavar="RUN", help="A run folder. Default: the newest one under runs/.")]
OneRun = Annotated[str | None, argument(metavar="RUN", help="The run folder.")]
RunAndSampler = Annotated[
    list[str] | None, argument(metavar="RUN [SAMPLER]", help="The run folder, and a sampler such as rollout-0.")
]
Address = Annotated[
    str,
    option(
        metavar="HOST:PORT",
        help="The run's controller, in place of RUN; TANDEM_TOKEN and TANDEM_CERTIFICATES hold what it demands.",
    ),
]


@operate_app.command(short_help="Show what a run is doing, or did.")
@command
def status(
    run_folder: RunArgument = None,
    address: Address = "",
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew with each change, until the run ends.")] = False,
) -> int:
    """Shows the services of a running run and where its groups are; of a finished one, its summary.

    Example: tandem status runs/demo --watch
    """
    from tandem.services.commands.find_controller import controller_at
    from tandem.services.commands.status import show_running, show_status, watch_running
    from tandem.services.run.folder import find_run

    if address:
        (watch_running if watch else show_running)(controller_at(address), console())
        return 0
    return show_status(find_run(run_folder), console(), watch=watch)


@operate_app.command(short_help="Change the number of a running run's samplers or environment services.")
@command
def scale(
    words: Annotated[list[str], argument(metavar="RUN SERVICE=COUNT", help="The run folder; the number of replicas.")],
    address: Address = "",
) -> int:
    """Orders the number of samplers of a running run, of its environment services if it has some, or of its reward
    services where the launcher can start several. A further sampler joins once its engine has started and has the
    current weights. One that is no longer wanted finishes its groups first, and an environment service its episodes.
    The order holds until the next one, also when the run is resumed.

    Example: tandem scale runs/mine rollout=2
    """
    from tandem.protos import control_pb2
    from tandem.protos.errors import UserError

    place, rest = _place(words, address)
    service, _, count = (rest or [""])[0].partition("=")
    if len(rest) != 1 or not count.isascii() or not count.isdigit():
        raise UserError(f"{' '.join(rest)!r} is not SERVICE=COUNT; example: tandem scale runs/mine rollout=2")
    request = control_pb2.ScaleRequest(service=service, replicas=min(int(count), _MOST_REPLICAS))
    with place.stub() as stub:
        stub.Scale(request, timeout=_SECONDS)
    print_line(console(), f"{service}: {count} ordered; `tandem status` shows who joins and leaves")
    return 0


@operate_app.command(short_help="Let samplers claim no more prompts.")
@command
def pause(words: RunAndSampler = None, address: Address = "") -> int:
    """Lets one sampler, or all, claim no more prompts until `tandem resume`, also if it restarts. It finishes the
    groups that it holds, and goes on receiving weights.

    Example: tandem pause runs/mine rollout-0
    """
    from tandem.protos import control_pb2

    place, rest = _place(words, address)
    with place.stub() as stub:
        reply = stub.Pause(control_pb2.PauseSamplersRequest(name=_one(rest)), timeout=_SECONDS)
        status = stub.Status(control_pb2.StatusRequest(), timeout=_SECONDS)
    print_line(console(), f"paused: {', '.join(reply.names) or 'every sampler that joins'}")
    for warning in status.warnings:
        print_line(console(), warning)
    return 0


@operate_app.command(short_help="Let paused samplers claim prompts again.")
@command
def resume(words: RunAndSampler = None, address: Address = "") -> int:
    """Lets one paused sampler, or all, claim prompts again. A run that has stopped goes on by `tandem run --resume`.

    Example: tandem resume runs/mine
    """
    from tandem.protos import control_pb2

    place, rest = _place(words, address)
    with place.stub() as stub:
        reply = stub.Resume(control_pb2.ResumeSamplersRequest(name=_one(rest)), timeout=_SECONDS)
    print_line(console(), f"resumed: {', '.join(reply.names) or 'no sampler was paused'}")
    return 0


@operate_app.command(short_help="Let one sampler finish and leave.")
@command
def drain(words: RunAndSampler = None, address: Address = "") -> int:
    """Lets one sampler finish its groups and leave the run for good. The ordered number of samplers falls by one.

    Example: tandem drain runs/mine rollout-0
    """
    from tandem.protos import control_pb2
    from tandem.protos.errors import UserError

    place, rest = _place(words, address)
    if not rest:
        raise UserError("name the sampler that is to leave; example: tandem drain runs/mine rollout-0")
    with place.stub() as stub:
        stub.Drain(control_pb2.DrainSamplerRequest(name=_one(rest)), timeout=_SECONDS)
    print_line(console(), f"{_one(rest)} finishes its groups and leaves")
    return 0


@operate_app.command(short_help="Let the trainer write a checkpoint.")
@command
def checkpoint(run_folder: OneRun = None, address: Address = "") -> int:
    """Lets the trainer write a checkpoint after the batch at hand, whatever trainer.checkpoint_every says. If it
    restarts before, it writes one after its start.

    Example: tandem checkpoint runs/mine
    """
    from tandem.protos import control_pb2

    place, _ = _place([run_folder] if run_folder else [], address)
    with place.stub() as stub:
        stub.Checkpoint(control_pb2.CheckpointRequest(), timeout=_SECONDS)
    print_line(console(), "the trainer writes a checkpoint after the batch at hand")
    return 0


@operate_app.command(short_help="Stop a running run.")
@command
def stop(run_folder: OneRun = None, address: Address = "") -> int:
    """Stops a run, as Ctrl-C does where it was started. It can be resumed.

    Example: tandem stop runs/mine
    """
    from tandem.protos import control_pb2

    place, _ = _place([run_folder] if run_folder else [], address)
    with place.stub() as stub:
        stub.Stop(control_pb2.StopRequest(), timeout=_SECONDS)
    print_line(console(), "the run stops")
    return 0


def _place(words: list[str] | None, address: str) -> tuple[ControllerPlace, list[str]]:
    """The controller, and the words after RUN, which is not given with an address."""
    from tandem.protos.errors import UserError
    from tandem.services.commands.find_controller import controller_at, controller_required
    from tandem.services.run.folder import find_run

    if address:
        return controller_at(address), words or []
    if not words:
        raise UserError("name a run folder, or the run's controller by --address")
    return controller_required(find_run(words[0])), words[1:]


def _one(words: list[str]) -> str:
    """The only word, or ""."""
    from tandem.protos.errors import UserError

    if len(words) > 1:
        raise UserError(f"{' '.join(words)}: name one sampler at a time")
    return words[0] if words else ""
