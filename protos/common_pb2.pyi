from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoReply(_message.Message):
    __slots__ = ("service", "software_version", "started_at", "policy_version", "incarnation", "run_id", "figures", "activity")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    service: str
    software_version: str
    started_at: float
    policy_version: int
    incarnation: int
    run_id: str
    figures: _containers.ScalarMap[str, float]
    activity: str
    def __init__(self, service: _Optional[str] = ..., software_version: _Optional[str] = ..., started_at: _Optional[float] = ..., policy_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., run_id: _Optional[str] = ..., figures: _Optional[_Mapping[str, float]] = ..., activity: _Optional[str] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("first_token", "incarnation", "policy_version")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    incarnation: int
    policy_version: int
    def __init__(self, first_token: _Optional[int] = ..., incarnation: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...
