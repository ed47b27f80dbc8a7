"""All errors of Tandem, each with its gRPC status code. An error crosses gRPC as its class: `tandem.services.rpc`."""

from __future__ import annotations

LINES_ABOVE = "the lines above name the cause"
"""Ends a message whose cause another process has already written to the same terminal or log."""


class TandemError(Exception):
    """Base class of all errors that Tandem raises on purpose. `grpc_code` is the name of a `grpc.StatusCode`."""

    grpc_code = "UNKNOWN"

    def __init_subclass__(cls, *, grpc_code: str = "") -> None:
        cls.grpc_code = grpc_code or cls.grpc_code


class UserError(TandemError, ValueError, grpc_code="INVALID_ARGUMENT"):
    """A user's input is wrong. The message names the input, its place and a remedy. Commands exit with code 2."""


class ConfigError(UserError):
    """A recipe or an override cannot be used."""


class DataError(UserError):
    """A dataset, a row of it, or a payload cannot be used."""


class SizeError(DataError, grpc_code="RESOURCE_EXHAUSTED"):
    """A message is larger than the limit. Nothing of it was processed."""


class ModelError(UserError):
    """A model folder or a chat template cannot be used."""


class ScorerError(UserError):
    """A scorer is unknown, cannot be imported, or is configured wrongly."""


class PluginError(UserError):
    """An entry point of another package cannot be used."""


class EnvironmentLackError(UserError, grpc_code="FAILED_PRECONDITION"):
    """The machine lacks something: a port, memory, disk space, a server."""


class AuthenticationError(UserError, grpc_code="UNAUTHENTICATED"):
    """The service does not accept the caller's token, or the caller not the service's certificate."""


class AccessError(UserError, grpc_code="PERMISSION_DENIED"):
    """The caller's token does not allow this call."""


class SchemaVersionError(DataError):
    """A payload was written by a newer Tandem than this one."""


class RunExistsError(UserError, grpc_code="ALREADY_EXISTS"):
    """The run id is in use and `--resume` was not given."""


class RunFolderError(UserError, grpc_code="FAILED_PRECONDITION"):
    """The run folder lacks what the run's ledger says has been trained, or the other way round."""


class JobError(UserError, grpc_code="FAILED_PRECONDITION"):
    """The state of a job does not allow the request. The message names the state."""


class JobExistsError(JobError, grpc_code="ALREADY_EXISTS"):
    """The idempotency key belongs to a job with another rubric or priority."""


class JobLimitError(JobError, grpc_code="RESOURCE_EXHAUSTED"):
    """Jobs have reached their limit of stored bytes. The message names the limit."""


class UnknownJobError(JobError, grpc_code="NOT_FOUND"):
    """There is no such job: it was never submitted, was deleted, or has expired."""


class FencedError(TandemError, grpc_code="ABORTED"):
    """A lease token or trainer incarnation is no longer current, so the caller's result was refused."""


class LostWritesError(FencedError):
    """Redis has lost writes that it had acknowledged to the caller, which must begin anew from what is on disk."""


class NotAdmittedError(TandemError, grpc_code="FAILED_PRECONDITION"):
    """A sampler without the published version tried to claim prompts, or was asked for a version it does not have."""


class DeadlineError(TandemError, grpc_code="DEADLINE_EXCEEDED"):
    """A wait reached its deadline."""


class UnavailableError(TandemError, grpc_code="UNAVAILABLE"):
    """Another service, or Redis, cannot be reached."""


class EpisodeError(TandemError, grpc_code="UNAVAILABLE"):
    """An environment raised, hung, died or broke its contract. It is tried again, or its group is given back."""


class WeightTransferError(TandemError, grpc_code="DATA_LOSS"):
    """A bucket did not arrive, or its digest did not match. The engine keeps its old weights."""


class MissingBaseWeightsError(WeightTransferError, grpc_code="FAILED_PRECONDITION"):
    """Adapters arrived without their base weights, and the sampler does not have the base either."""


class MissingVersionError(WeightTransferError, grpc_code="FAILED_PRECONDITION"):
    """A difference arrived to a version that the sampler does not hold. The message names both versions."""


class SelectionError(TandemError, grpc_code="RESOURCE_EXHAUSTED"):
    """Selection rejected too many groups in a row. The message has the counts."""


class TrainingError(TandemError, grpc_code="INTERNAL"):
    """Training cannot continue: the gradients of too many batches in a row were not finite."""


class LedgerError(TandemError, grpc_code="INTERNAL"):
    """The conservation check failed: groups were lost or counted twice."""


def error_class(name: str) -> type[TandemError]:
    """The error class of that name, or `TandemError` for an unknown name."""
    classes = [TandemError]
    for one in classes:
        classes += one.__subclasses__()
    return next((one for one in classes if one.__name__ == name), TandemError)
