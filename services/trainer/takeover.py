"""How a trainer takes a run over: it checks that it can train, and only then fences the trainer before it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, closing

import grpc

from tandem.protos import common_pb2, common_pb2_grpc
from tandem.protos.errors import DeadlineError, LedgerError, RunExistsError, RunFolderError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.rollback import check_records, recorded_version
from tandem.services.buffer.types import ALIVE_SECONDS
from tandem.services.config import Recipe
from tandem.services.process import lock_file
from tandem.services.rpc.client import connect
from tandem.services.rpc.tokens import Role, run_token
from tandem.services.run.endpoint import calling_credentials
from tandem.services.trainer.recovery import (
    CHECKPOINTS_FOLDER,
    ResumePoint,
    begin_incarnation,
    check_world_size,
    find_resume_point,
    read_records,
    trainer_lock,
)
from tandem.trainer.batch.record import read_plan
from tandem.trainer.checkpoints.state import LOADING_FILE

TAKEOVER_VARIABLE = "TANDEM_TAKEOVER"
"""Environment variable of the ranks: 1 if they take the run over from a trainer that is alive."""
_INFO_SECONDS = 2.0
_LOADING_SECONDS = 30.0


class Takeover(AbstractContextManager["Takeover"]):
    """Rank 0's way to a run, in this order: `prepare`, then all ranks load the checkpoint, then `begin`. Leaving the
    block unlocks the run folder.

    With `hands_over`, another trainer of the run may still train meanwhile. Then `fence` ends it before `begin`, and
    the ranks load what it has saved since.
    """

    def __init__(self, recipe: Recipe, buffer: Buffer, world_size: int, *, hands_over: bool) -> None:
        self._recipe = recipe
        self._buffer = buffer
        self._world_size = world_size
        self._hands_over = hands_over
        self._stack = ExitStack()
        self._loading = self._stack.enter_context(ExitStack())
        """Keeps the trainer that still trains from deleting the checkpoint that the ranks load."""
        self.resume_point = ResumePoint("", 0, ())

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def prepare(self) -> ResumePoint:
        """Checks everything that can keep this trainer from training, and changes nothing.

        If this trainer takes over from another one, that one deletes no checkpoint until `fence`. Otherwise raises
        DeadlineError if another one holds the run folder, and RunExistsError if it answers. Raises RunFolderError or
        LedgerError if the folder's records contradict the ledger, ConfigError if they need more ranks.
        """
        if not self._hands_over:
            self._stack.enter_context(trainer_lock(self._recipe.folder))
            check_no_other_trainer(self._buffer, self._recipe)  # with another folder, or where the lock does not hold
        elif (checkpoints := self._recipe.folder / CHECKPOINTS_FOLDER).is_dir():
            file = self._loading.enter_context((checkpoints / LOADING_FILE).open("a+"))
            if not lock_file(file, _LOADING_SECONDS, shared=True):
                raise DeadlineError(f"{file.name} has been locked for {_LOADING_SECONDS:.0f} s; end what holds it")
        return self._check()

    def fence(self) -> ResumePoint:
        """Ends the trainer that is alive: its next step is refused. Returns the resume point that it leaves. Raises
        DeadlineError if it does not end in time.
        """
        begin_incarnation(self._buffer, self._recipe.folder)
        # The other ranks wait in a collective meanwhile.
        seconds = self._recipe.trainer.collective_timeout_seconds / 2
        self._stack.enter_context(trainer_lock(self._recipe.folder, seconds))
        self._loading.close()
        return self._check()

    def begin(self) -> int:
        """Begins a new incarnation, which fences every earlier one, and sets the ledger to match the run folder."""
        folder = self._recipe.folder
        incarnation = begin_incarnation(self._buffer, folder)
        if find_resume_point(folder) != self.resume_point:  # on some network mounts its lock does not hold
            raise LedgerError(f"an earlier trainer still wrote into {folder}; this one has to start again")
        checkpoint_version = self.resume_point.checkpoint_version
        records = read_records(self._buffer, folder, checkpoint_version)
        self._buffer.rollback(incarnation, checkpoint_version, records)
        return incarnation

    def _check(self) -> ResumePoint:
        folder, known = self._recipe.folder, recorded_version(self._buffer.connection)
        self.resume_point = found = find_resume_point(folder)
        for version in found.recorded:
            check_world_size(read_plan(folder, version), self._world_size)
        records = read_records(self._buffer, folder, found.checkpoint_version)
        try:
            check_records(self._buffer.connection, found.checkpoint_version, records, known)
        except RunFolderError as error:
            raise RunFolderError(f"{folder}: {error}") from None
        return found


def check_no_other_trainer(buffer: Buffer, recipe: Recipe) -> None:
    """Raises RunExistsError if a trainer of the run answers."""
    address = buffer.services().get("trainer", "")
    if not address or buffer.silences().get("trainer", ALIVE_SECONDS) >= ALIVE_SECONDS:
        return
    token, name = run_token(buffer.secret(), Role.read), recipe.run.server_name
    with closing(connect(address, token, calling_credentials(recipe), name)) as channel:
        try:
            info = common_pb2_grpc.InfoServiceStub(channel).Info(common_pb2.InfoRequest(), timeout=_INFO_SECONDS)
        except grpc.RpcError:
            return  # it has ended, or it hangs and will be fenced
    if (info.service, info.run_id) == ("trainer", recipe.run.run_id):  # another service may have got its port
        raise RunExistsError(
            f"run {recipe.run.run_id} has a trainer at {address}: stop that one first, or take over from it by "
            f"`tandem takeover {recipe.folder}`"
        )
