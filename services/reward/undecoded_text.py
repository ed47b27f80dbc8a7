"""Reads requests in which the text of an item is not UTF-8, so that this item alone is at fault.

Protobuf refuses such a request as a whole. The messages here are those of reward.proto with `bytes` in place of an
item's strings; `wire.read_items` decodes them item by item. Only requests that protobuf refused are read this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from tandem.protos import reward_pb2

MessageT = TypeVar("MessageT", bound=Message)


def _bytes_pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto()
    reward_pb2.DESCRIPTOR.CopyToProto(file)
    (request,) = [message for message in file.message_type if message.name == "ScoreRequest"]
    (item,) = request.nested_type
    for field in item.field:
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _bytes_pool()


def _reader(kind: type[MessageT]) -> Callable[[bytes], MessageT]:
    """Reads the message of the same name in which texts are bytes. Raises DecodeError."""
    message: type[Message] = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(kind.DESCRIPTOR.full_name))
    return cast("Callable[[bytes], MessageT]", message.FromString)


READERS: dict[str, Callable[[bytes], object]] = {
    "/tandem.v1.RewardService/Score": _reader(reward_pb2.ScoreRequest),
    "/tandem.v1.RewardService/ScoreStream": _reader(reward_pb2.ScoreStreamRequest),
    "/tandem.v1.RewardService/SubmitJob": _reader(reward_pb2.SubmitJobRequest),
}
"""By the path of a method, for `RpcLimits`."""

_read_chunk = _reader(reward_pb2.SubmitJobRequest.Chunk)


def chunk_of(data: bytes) -> reward_pb2.SubmitJobRequest.Chunk:
    """A stored chunk; its texts are bytes if one of them is not UTF-8."""
    try:
        return reward_pb2.SubmitJobRequest.Chunk.FromString(data)
    except DecodeError:
        return _read_chunk(data)
