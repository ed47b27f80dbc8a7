from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("items", "rubric")
    class Item(_message.Message):
        __slots__ = ("data_source", "solution", "ground_truth", "extra_info", "group")
        DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
        SOLUTION_FIELD_NUMBER: _ClassVar[int]
        GROUND_TRUTH_FIELD_NUMBER: _ClassVar[int]
        EXTRA_INFO_FIELD_NUMBER: _ClassVar[int]
        GROUP_FIELD_NUMBER: _ClassVar[int]
        data_source: str
        solution: str
        ground_truth: str
        extra_info: str
        group: str
        def __init__(self, data_source: _Optional[str] = ..., solution: _Optional[str] = ..., ground_truth: _Optional[str] = ..., extra_info: _Optional[str] = ..., group: _Optional[str] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    RUBRIC_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ScoreRequest.Item]
    rubric: str
    def __init__(self, items: _Optional[_Iterable[_Union[ScoreRequest.Item, _Mapping]]] = ..., rubric: _Optional[str] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("items",)
    class Scored(_message.Message):
        __slots__ = ("value", "breakdown")
        class BreakdownEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: float
            def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
        VALUE_FIELD_NUMBER: _ClassVar[int]
        BREAKDOWN_FIELD_NUMBER: _ClassVar[int]
        value: float
        breakdown: _containers.ScalarMap[str, float]
        def __init__(self, value: _Optional[float] = ..., breakdown: _Optional[_Mapping[str, float]] = ...) -> None: ...
    class Unscored(_message.Message):
        __slots__ = ("reason", "detail")
        REASON_FIELD_NUMBER: _ClassVar[int]
        DETAIL_FIELD_NUMBER: _ClassVar[int]
        reason: str
        detail: str
        def __init__(self, reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...
    class Item(_message.Message):
        __slots__ = ("scored", "unscored")
        SCORED_FIELD_NUMBER: _ClassVar[int]
        UNSCORED_FIELD_NUMBER: _ClassVar[int]
        scored: ScoreReply.Scored
        unscored: ScoreReply.Unscored
        def __init__(self, scored: _Optional[_Union[ScoreReply.Scored, _Mapping]] = ..., unscored: _Optional[_Union[ScoreReply.Unscored, _Mapping]] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ScoreReply.Item]
    def __init__(self, items: _Optional[_Iterable[_Union[ScoreReply.Item, _Mapping]]] = ...) -> None: ...

class ScoreStreamRequest(_message.Message):
    __slots__ = ("request_id", "request")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    request: ScoreRequest
    def __init__(self, request_id: _Optional[int] = ..., request: _Optional[_Union[ScoreRequest, _Mapping]] = ...) -> None: ...

class ScoreStreamReply(_message.Message):
    __slots__ = ("request_id", "reply", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    reply: ScoreReply
    error: StreamError
    def __init__(self, request_id: _Optional[int] = ..., reply: _Optional[_Union[ScoreReply, _Mapping]] = ..., error: _Optional[_Union[StreamError, _Mapping]] = ...) -> None: ...

class StreamError(_message.Message):
    __slots__ = ("message", "invalid_request", "too_large", "invalid_rubric", "unknown_job", "wrong_state", "key_in_use", "limit_reached")
    class InvalidRequest(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class TooLarge(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class InvalidRubric(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class UnknownJob(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class WrongState(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class KeyInUse(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class LimitReached(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    INVALID_REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOO_LARGE_FIELD_NUMBER: _ClassVar[int]
    INVALID_RUBRIC_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_JOB_FIELD_NUMBER: _ClassVar[int]
    WRONG_STATE_FIELD_NUMBER: _ClassVar[int]
    KEY_IN_USE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_REACHED_FIELD_NUMBER: _ClassVar[int]
    message: str
    invalid_request: StreamError.InvalidRequest
    too_large: StreamError.TooLarge
    invalid_rubric: StreamError.InvalidRubric
    unknown_job: StreamError.UnknownJob
    wrong_state: StreamError.WrongState
    key_in_use: StreamError.KeyInUse
    limit_reached: StreamError.LimitReached
    def __init__(self, message: _Optional[str] = ..., invalid_request: _Optional[_Union[StreamError.InvalidRequest, _Mapping]] = ..., too_large: _Optional[_Union[StreamError.TooLarge, _Mapping]] = ..., invalid_rubric: _Optional[_Union[StreamError.InvalidRubric, _Mapping]] = ..., unknown_job: _Optional[_Union[StreamError.UnknownJob, _Mapping]] = ..., wrong_state: _Optional[_Union[StreamError.WrongState, _Mapping]] = ..., key_in_use: _Optional[_Union[StreamError.KeyInUse, _Mapping]] = ..., limit_reached: _Optional[_Union[StreamError.LimitReached, _Mapping]] = ...) -> None: ...

class SubmitJobRequest(_message.Message):
    __slots__ = ("header", "chunk", "seal")
    class Header(_message.Message):
        __slots__ = ("idempotency_key", "rubric", "priority", "name")
        IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
        RUBRIC_FIELD_NUMBER: _ClassVar[int]
        PRIORITY_FIELD_NUMBER: _ClassVar[int]
        NAME_FIELD_NUMBER: _ClassVar[int]
        idempotency_key: str
        rubric: str
        priority: int
        name: str
        def __init__(self, idempotency_key: _Optional[str] = ..., rubric: _Optional[str] = ..., priority: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...
    class Chunk(_message.Message):
        __slots__ = ("index", "items")
        INDEX_FIELD_NUMBER: _ClassVar[int]
        ITEMS_FIELD_NUMBER: _ClassVar[int]
        index: int
        items: _containers.RepeatedCompositeFieldContainer[ScoreRequest.Item]
        def __init__(self, index: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ScoreRequest.Item, _Mapping]]] = ...) -> None: ...
    class Seal(_message.Message):
        __slots__ = ("num_chunks",)
        NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
        num_chunks: int
        def __init__(self, num_chunks: _Optional[int] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    header: SubmitJobRequest.Header
    chunk: SubmitJobRequest.Chunk
    seal: SubmitJobRequest.Seal
    def __init__(self, header: _Optional[_Union[SubmitJobRequest.Header, _Mapping]] = ..., chunk: _Optional[_Union[SubmitJobRequest.Chunk, _Mapping]] = ..., seal: _Optional[_Union[SubmitJobRequest.Seal, _Mapping]] = ...) -> None: ...

class SubmitJobReply(_message.Message):
    __slots__ = ("job", "next_chunk", "error")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NEXT_CHUNK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    job: Job
    next_chunk: int
    error: StreamError
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., next_chunk: _Optional[int] = ..., error: _Optional[_Union[StreamError, _Mapping]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("job_id", "idempotency_key", "name", "state", "priority", "num_items", "num_scored", "num_unscored", "num_waiting", "mean_value", "created_at", "finished_at", "expires_at", "result_bytes")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Job.State]
        OPEN: _ClassVar[Job.State]
        RUNNING: _ClassVar[Job.State]
        DONE: _ClassVar[Job.State]
        CANCELLED: _ClassVar[Job.State]
        EXPIRED: _ClassVar[Job.State]
    STATE_UNSPECIFIED: Job.State
    OPEN: Job.State
    RUNNING: Job.State
    DONE: Job.State
    CANCELLED: Job.State
    EXPIRED: Job.State
    class NumUnscoredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_ITEMS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORED_FIELD_NUMBER: _ClassVar[int]
    NUM_UNSCORED_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MEAN_VALUE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    RESULT_BYTES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    idempotency_key: str
    name: str
    state: Job.State
    priority: int
    num_items: int
    num_scored: int
    num_unscored: _containers.ScalarMap[str, int]
    num_waiting: int
    mean_value: float
    created_at: float
    finished_at: float
    expires_at: float
    result_bytes: int
    def __init__(self, job_id: _Optional[str] = ..., idempotency_key: _Optional[str] = ..., name: _Optional[str] = ..., state: _Optional[_Union[Job.State, str]] = ..., priority: _Optional[int] = ..., num_items: _Optional[int] = ..., num_scored: _Optional[int] = ..., num_unscored: _Optional[_Mapping[str, int]] = ..., num_waiting: _Optional[int] = ..., mean_value: _Optional[float] = ..., created_at: _Optional[float] = ..., finished_at: _Optional[float] = ..., expires_at: _Optional[float] = ..., result_bytes: _Optional[int] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("job_id", "with_results", "after_cursor")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_RESULTS_FIELD_NUMBER: _ClassVar[int]
    AFTER_CURSOR_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    with_results: bool
    after_cursor: int
    def __init__(self, job_id: _Optional[str] = ..., with_results: _Optional[bool] = ..., after_cursor: _Optional[int] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("job", "results", "error", "cursor")
    class Results(_message.Message):
        __slots__ = ("first_item", "items")
        FIRST_ITEM_FIELD_NUMBER: _ClassVar[int]
        ITEMS_FIELD_NUMBER: _ClassVar[int]
        first_item: int
        items: _containers.RepeatedCompositeFieldContainer[ScoreReply.Item]
        def __init__(self, first_item: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ScoreReply.Item, _Mapping]]] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    job: Job
    results: JobEvent.Results
    error: StreamError
    cursor: int
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., results: _Optional[_Union[JobEvent.Results, _Mapping]] = ..., error: _Optional[_Union[StreamError, _Mapping]] = ..., cursor: _Optional[int] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class DeleteJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    def __init__(self, job_id: _Optional[str] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListJobsReply(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class ListScorersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListScorersReply(_message.Message):
    __slots__ = ("scorers", "limits", "default_rubric")
    class Parameter(_message.Message):
        __slots__ = ("name", "type", "default", "description")
        NAME_FIELD_NUMBER: _ClassVar[int]
        TYPE_FIELD_NUMBER: _ClassVar[int]
        DEFAULT_FIELD_NUMBER: _ClassVar[int]
        DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
        name: str
        type: str
        default: str
        description: str
        def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., default: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...
    class ScorerInfo(_message.Message):
        __slots__ = ("name", "version", "summary", "parameters", "isolation")
        NAME_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        SUMMARY_FIELD_NUMBER: _ClassVar[int]
        PARAMETERS_FIELD_NUMBER: _ClassVar[int]
        ISOLATION_FIELD_NUMBER: _ClassVar[int]
        name: str
        version: str
        summary: str
        parameters: _containers.RepeatedCompositeFieldContainer[ListScorersReply.Parameter]
        isolation: str
        def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., summary: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[ListScorersReply.Parameter, _Mapping]]] = ..., isolation: _Optional[str] = ...) -> None: ...
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_RUBRIC_FIELD_NUMBER: _ClassVar[int]
    scorers: _containers.RepeatedCompositeFieldContainer[ListScorersReply.ScorerInfo]
    limits: _containers.ScalarMap[str, float]
    default_rubric: str
    def __init__(self, scorers: _Optional[_Iterable[_Union[ListScorersReply.ScorerInfo, _Mapping]]] = ..., limits: _Optional[_Mapping[str, float]] = ..., default_rubric: _Optional[str] = ...) -> None: ...
