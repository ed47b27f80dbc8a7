from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run_id", "run_dir", "launcher", "ended", "services", "desired_replicas", "counts", "decisions", "warnings")
    class Service(_message.Message):
        __slots__ = ("name", "kind", "pid", "state", "restarts", "address", "activity", "policy_version", "paused", "heartbeat_age_seconds")
        NAME_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        PID_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        RESTARTS_FIELD_NUMBER: _ClassVar[int]
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        ACTIVITY_FIELD_NUMBER: _ClassVar[int]
        POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
        PAUSED_FIELD_NUMBER: _ClassVar[int]
        HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
        name: str
        kind: str
        pid: int
        state: str
        restarts: int
        address: str
        activity: str
        policy_version: int
        paused: bool
        heartbeat_age_seconds: float
        def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., restarts: _Optional[int] = ..., address: _Optional[str] = ..., activity: _Optional[str] = ..., policy_version: _Optional[int] = ..., paused: _Optional[bool] = ..., heartbeat_age_seconds: _Optional[float] = ...) -> None: ...
    class Decision(_message.Message):
        __slots__ = ("time", "service", "from_replicas", "to_replicas", "reason", "dry_run")
        TIME_FIELD_NUMBER: _ClassVar[int]
        SERVICE_FIELD_NUMBER: _ClassVar[int]
        FROM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
        TO_REPLICAS_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        DRY_RUN_FIELD_NUMBER: _ClassVar[int]
        time: float
        service: str
        from_replicas: int
        to_replicas: int
        reason: str
        dry_run: bool
        def __init__(self, time: _Optional[float] = ..., service: _Optional[str] = ..., from_replicas: _Optional[int] = ..., to_replicas: _Optional[int] = ..., reason: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...
    class DesiredReplicasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    LAUNCHER_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    DESIRED_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    run_dir: str
    launcher: str
    ended: str
    services: _containers.RepeatedCompositeFieldContainer[StatusReply.Service]
    desired_replicas: _containers.ScalarMap[str, int]
    counts: _containers.ScalarMap[str, int]
    decisions: _containers.RepeatedCompositeFieldContainer[StatusReply.Decision]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., run_dir: _Optional[str] = ..., launcher: _Optional[str] = ..., ended: _Optional[str] = ..., services: _Optional[_Iterable[_Union[StatusReply.Service, _Mapping]]] = ..., desired_replicas: _Optional[_Mapping[str, int]] = ..., counts: _Optional[_Mapping[str, int]] = ..., decisions: _Optional[_Iterable[_Union[StatusReply.Decision, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class GetLedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLedgerReply(_message.Message):
    __slots__ = ("counts", "violations")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    violations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ..., violations: _Optional[_Iterable[str]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("service", "replicas")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    service: str
    replicas: int
    def __init__(self, service: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainSamplerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DrainSamplerReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseSamplersRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PauseSamplersReply(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class ResumeSamplersRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ResumeSamplersReply(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
