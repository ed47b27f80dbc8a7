from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusReply(_message.Message):
    __slots__ = ("run_id", "run_dir", "services")
    class Service(_message.Message):
        __slots__ = ("name", "pid", "state", "restarts", "address", "activity")
        NAME_FIELD_NUMBER: _ClassVar[int]
        PID_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        RESTARTS_FIELD_NUMBER: _ClassVar[int]
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        ACTIVITY_FIELD_NUMBER: _ClassVar[int]
        name: str
        pid: int
        state: str
        restarts: int
        address: str
        activity: str
        def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., restarts: _Optional[int] = ..., address: _Optional[str] = ..., activity: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    run_dir: str
    services: _containers.RepeatedCompositeFieldContainer[GetStatusReply.Service]
    def __init__(self, run_id: _Optional[str] = ..., run_dir: _Optional[str] = ..., services: _Optional[_Iterable[_Union[GetStatusReply.Service, _Mapping]]] = ...) -> None: ...

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

class StopRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopRunReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
