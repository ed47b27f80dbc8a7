from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("items",)
    class Item(_message.Message):
        __slots__ = ("data_source", "solution", "ground_truth", "extra_info")
        DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
        SOLUTION_FIELD_NUMBER: _ClassVar[int]
        GROUND_TRUTH_FIELD_NUMBER: _ClassVar[int]
        EXTRA_INFO_FIELD_NUMBER: _ClassVar[int]
        data_source: str
        solution: str
        ground_truth: str
        extra_info: str
        def __init__(self, data_source: _Optional[str] = ..., solution: _Optional[str] = ..., ground_truth: _Optional[str] = ..., extra_info: _Optional[str] = ...) -> None: ...
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ScoreRequest.Item]
    def __init__(self, items: _Optional[_Iterable[_Union[ScoreRequest.Item, _Mapping]]] = ...) -> None: ...

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
