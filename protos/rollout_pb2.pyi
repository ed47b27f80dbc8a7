from tandem.protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "repetition_penalty", "min_p")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    repetition_penalty: float
    min_p: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., repetition_penalty: _Optional[float] = ..., min_p: _Optional[float] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("items", "sampling", "required_version")
    class Item(_message.Message):
        __slots__ = ("prompt_ids", "num_samples", "episode")
        PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
        NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
        EPISODE_FIELD_NUMBER: _ClassVar[int]
        prompt_ids: bytes
        num_samples: int
        episode: GenerateRequest.Episode
        def __init__(self, prompt_ids: _Optional[bytes] = ..., num_samples: _Optional[int] = ..., episode: _Optional[_Union[GenerateRequest.Episode, _Mapping]] = ...) -> None: ...
    class Episode(_message.Message):
        __slots__ = ("row", "name", "environment")
        ROW_FIELD_NUMBER: _ClassVar[int]
        NAME_FIELD_NUMBER: _ClassVar[int]
        ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
        row: str
        name: str
        environment: str
        def __init__(self, row: _Optional[str] = ..., name: _Optional[str] = ..., environment: _Optional[str] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_VERSION_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[GenerateRequest.Item]
    sampling: SamplingParameters
    required_version: int
    def __init__(self, items: _Optional[_Iterable[_Union[GenerateRequest.Item, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., required_version: _Optional[int] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("items",)
    class Sample(_message.Message):
        __slots__ = ("ids", "behavior_logprobs", "text", "finish_reason", "spans", "earned_reward", "episode")
        IDS_FIELD_NUMBER: _ClassVar[int]
        BEHAVIOR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
        SPANS_FIELD_NUMBER: _ClassVar[int]
        EARNED_REWARD_FIELD_NUMBER: _ClassVar[int]
        EPISODE_FIELD_NUMBER: _ClassVar[int]
        ids: bytes
        behavior_logprobs: bytes
        text: str
        finish_reason: str
        spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
        earned_reward: float
        episode: str
        def __init__(self, ids: _Optional[bytes] = ..., behavior_logprobs: _Optional[bytes] = ..., text: _Optional[str] = ..., finish_reason: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ..., earned_reward: _Optional[float] = ..., episode: _Optional[str] = ...) -> None: ...
    class Item(_message.Message):
        __slots__ = ("samples",)
        SAMPLES_FIELD_NUMBER: _ClassVar[int]
        samples: _containers.RepeatedCompositeFieldContainer[GenerateReply.Sample]
        def __init__(self, samples: _Optional[_Iterable[_Union[GenerateReply.Sample, _Mapping]]] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[GenerateReply.Item]
    def __init__(self, items: _Optional[_Iterable[_Union[GenerateReply.Item, _Mapping]]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_seconds",)
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    def __init__(self, timeout_seconds: _Optional[float] = ...) -> None: ...

class SamplerState(_message.Message):
    __slots__ = ("paused", "groups_in_flight", "policy_version")
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    paused: bool
    groups_in_flight: int
    policy_version: int
    def __init__(self, paused: _Optional[bool] = ..., groups_in_flight: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...

class JoinWeightGroupRequest(_message.Message):
    __slots__ = ("host", "group_name", "first_rank", "world_size", "backend", "timeout_seconds", "incarnation")
    HOST_FIELD_NUMBER: _ClassVar[int]
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    host: str
    group_name: str
    first_rank: int
    world_size: int
    backend: str
    timeout_seconds: float
    incarnation: int
    def __init__(self, host: _Optional[str] = ..., group_name: _Optional[str] = ..., first_rank: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ..., timeout_seconds: _Optional[float] = ..., incarnation: _Optional[int] = ...) -> None: ...

class JoinWeightGroupReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("manifest", "group_name", "timeout_seconds")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    GROUP_NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    group_name: str
    timeout_seconds: float
    def __init__(self, manifest: _Optional[bytes] = ..., group_name: _Optional[str] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class UpdateWeightsReply(_message.Message):
    __slots__ = ("policy_version", "digests", "transfer_seconds", "stall_seconds")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    digests: _containers.RepeatedScalarFieldContainer[str]
    transfer_seconds: float
    stall_seconds: float
    def __init__(self, policy_version: _Optional[int] = ..., digests: _Optional[_Iterable[str]] = ..., transfer_seconds: _Optional[float] = ..., stall_seconds: _Optional[float] = ...) -> None: ...
