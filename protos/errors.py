"""All errors of Tandem, each with its gRPC status code.

`tandem.services.rpc.limits` turns the `TandemError` of a handler into a status with that code, and
`tandem.services.rpc.client` back into the same class, so callers catch the same classes in process and over gRPC.
"""

from __future__ import annotations

LINES_ABOVE = "the lines above name the cause"
"""Ends a message whose cause another process has already written to the same terminal or log."""


class TandemError(Exception):
    """Base class of all errors that Tandem raises on purpose. `grpc_code` is the name of a `grpc.StatusCode`."""

    grpc_code: str = "UNKNOWN"


class UserError(TandemError, ValueError):
    """A user's input is wrong. The message names the input, its place and a remedy. Commands exit with code 2."""

    grpc_code = "INVALID_ARGUMENT"


class ConfigError(UserError):
    """A recipe or an override cannot be used."""


class DataError(UserError):
    """A dataset, a row of it, or a payload cannot be used."""


class SizeError(DataError):
    """A message is larger than the limit. Nothing of it was processed."""

    grpc_code = "RESOURCE_EXHAUSTED"


class ModelError(UserError):
    """A model folder or a chat template cannot be used."""


class ScorerError(UserError):
    """A scorer is unknown, cannot be imported, or is configured wrongly."""


class PluginError(UserError):
    """An entry point of another package cannot be used."""


class EnvironmentLackError(UserError):
    """The machine lacks something: a port, memory, disk space, a server."""

    grpc_code = "FAILED_PRECONDITION"


class SchemaVersionError(DataError):
    """A payload was written by a newer Tandem than this one."""


class RunExistsError(UserError):
    """The run id is in use and `--resume` was not given."""

    grpc_code = "ALREADY_EXISTS"


class JobError(UserError):
    """The state of a job does not allow the request. The message names the state."""

    grpc_code = "FAILED_PRECONDITION"


class JobExistsError(JobError):
    """The idempotency key belongs to a job with another rubric or priority."""

    grpc_code = "ALREADY_EXISTS"


class JobLimitError(JobError):
    """Jobs have reached their limit of stored bytes. The message names the limit."""

    grpc_code = "RESOURCE_EXHAUSTED"


class UnknownJobError(JobError):
    """There is no such job: it was never submitted, was deleted, or has expired."""

    grpc_code = "NOT_FOUND"


class FencedError(TandemError):
    """A lease token or trainer incarnation is no longer current, so the caller's result was refused."""

    grpc_code = "ABORTED"


class NotAdmittedError(TandemError):
    """A sampler without the published version tried to claim prompts, or was asked for a version it does not have."""

    grpc_code = "FAILED_PRECONDITION"


class DeadlineError(TandemError):
    """A wait reached its deadline."""

    grpc_code = "DEADLINE_EXCEEDED"


class UnavailableError(TandemError):
    """Another service, or Redis, cannot be reached."""

    grpc_code = "UNAVAILABLE"


class WeightTransferError(TandemError):
    """A bucket did not arrive, or its digest did not match. The engine keeps its old weights."""

    grpc_code = "DATA_LOSS"


class MissingBaseWeightsError(WeightTransferError):
    """Adapters arrived without their base weights, and the sampler does not have the base either."""

    grpc_code = "FAILED_PRECONDITION"


class SelectionError(TandemError):
    """Selection rejected too many groups in a row. The message has the counts."""

    grpc_code = "RESOURCE_EXHAUSTED"


class TrainingError(TandemError):
    """Training cannot continue: the gradients of too many batches in a row were not finite."""

    grpc_code = "INTERNAL"


class LedgerError(TandemError):
    """The conservation check failed: groups were lost or counted twice."""

    grpc_code = "INTERNAL"


def _tree(root: type[TandemError]) -> dict[str, type[TandemError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def error_class(name: str) -> type[TandemError]:
    """Returns the error class of that name, or `TandemError` for an unknown name."""
    return _tree(TandemError).get(name, TandemError)
