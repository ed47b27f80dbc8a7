"""Requests with an item whose text is not UTF-8: protobuf refuses the whole message, and here it is that item's fault
alone.

The twins are the messages of reward.proto with `bytes` where an item has `string`s. On the wire they are the same, but
nothing checks the texts before `tandem.services.reward.wire.read_items` does, item by item. Only what was refused is
read so: the usual way is the faster one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from tandem.protos import reward_pb2

Given = TypeVar("Given", bound=Message)


def _twin_pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto()
    reward_pb2.DESCRIPTOR.CopyToProto(file)
    (request,) = [message for message in file.message_type if message.name == "ScoreRequest"]
    (item,) = request.nested_type
    for field in item.field:
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _twin_pool()


def _reader(kind: type[Given]) -> Callable[[bytes], Given]:
    """Reads a message's twin, which has the same names. Raises DecodeError."""
    twin: Any = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(kind.DESCRIPTOR.full_name))
    return cast("Callable[[bytes], Given]", twin.FromString)


READERS: dict[str, Callable[[bytes], Any]] = {
    "/tandem.v1.RewardService/Score": _reader(reward_pb2.ScoreRequest),
    "/tandem.v1.RewardService/ScoreStream": _reader(reward_pb2.ScoreStreamRequest),
    "/tandem.v1.RewardService/SubmitJob": _reader(reward_pb2.SubmitJobRequest),
}
"""By the path of a method, for `tandem.services.rpc.RpcLimits`."""

_read_chunk = _reader(reward_pb2.SubmitJobRequest.Chunk)


def chunk_of(data: bytes) -> reward_pb2.SubmitJobRequest.Chunk:
    """A chunk as it was stored; its twin, if an item has a text that is not UTF-8."""
    try:
        return reward_pb2.SubmitJobRequest.Chunk.FromString(data)
    except DecodeError:
        return _read_chunk(data)
