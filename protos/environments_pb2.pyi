from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("resume", "tools", "lease_seconds", "unsafe_tools")
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNSAFE_TOOLS_FIELD_NUMBER: _ClassVar[int]
    resume: str
    tools: str
    lease_seconds: float
    unsafe_tools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, resume: _Optional[str] = ..., tools: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., unsafe_tools: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("environment_id", "episode_id", "task", "seed")
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    environment_id: str
    episode_id: str
    task: str
    seed: int
    def __init__(self, environment_id: _Optional[str] = ..., episode_id: _Optional[str] = ..., task: _Optional[str] = ..., seed: _Optional[int] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: str
    def __init__(self, messages: _Optional[str] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("environment_id", "episode_id", "state")
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    environment_id: str
    episode_id: str
    state: bytes
    def __init__(self, environment_id: _Optional[str] = ..., episode_id: _Optional[str] = ..., state: _Optional[bytes] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("environment_id", "idempotency_key", "action", "timeout_seconds")
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    environment_id: str
    idempotency_key: str
    action: str
    timeout_seconds: float
    def __init__(self, environment_id: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., action: _Optional[str] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: str
    def __init__(self, result: _Optional[str] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("environment_id",)
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    environment_id: str
    def __init__(self, environment_id: _Optional[str] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: bytes
    def __init__(self, state: _Optional[bytes] = ...) -> None: ...

class FinalRewardRequest(_message.Message):
    __slots__ = ("environment_id",)
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    environment_id: str
    def __init__(self, environment_id: _Optional[str] = ...) -> None: ...

class FinalRewardReply(_message.Message):
    __slots__ = ("reward",)
    REWARD_FIELD_NUMBER: _ClassVar[int]
    reward: float
    def __init__(self, reward: _Optional[float] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("environment_id",)
    ENVIRONMENT_ID_FIELD_NUMBER: _ClassVar[int]
    environment_id: str
    def __init__(self, environment_id: _Optional[str] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("environment_ids",)
    ENVIRONMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    environment_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, environment_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainEnvironmentsRequest(_message.Message):
    __slots__ = ("timeout_seconds",)
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    def __init__(self, timeout_seconds: _Optional[float] = ...) -> None: ...

class DrainEnvironmentsReply(_message.Message):
    __slots__ = ("num_open",)
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    num_open: int
    def __init__(self, num_open: _Optional[int] = ...) -> None: ...
