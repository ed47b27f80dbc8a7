from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SaveCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveCheckpointReply(_message.Message):
    __slots__ = ("policy_version", "path")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    path: str
    def __init__(self, policy_version: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class GetProgressRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetProgressReply(_message.Message):
    __slots__ = ("policy_version", "optimizer_step", "total_batches", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BATCHES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    optimizer_step: int
    total_batches: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, policy_version: _Optional[int] = ..., optimizer_step: _Optional[int] = ..., total_batches: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...
