"""The part of `grpcurl` that docs/reward.md uses: it learns the services by reflection, reads JSON and prints JSON."""

from __future__ import annotations

import json
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

DEADLINE_SECONDS = 60.0
_MAPS = ("breakdown", "limits", "numUnscored")
_TYPES = {number: name[5:].lower() for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()}


def grpcurl(words: list[str], given: str) -> str:
    """The output of grpcurl for these arguments, with `given` on standard input (`-d @`)."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        assert option in ("-plaintext", "-d"), f"grpcurl has an option {option}, this stand-in has not"
        options[option] = rest.pop(0) if option == "-d" else ""
    assert "-plaintext" in options, "the service speaks no TLS"
    address, *verb = rest
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        if verb == ["list"]:
            return "".join(f"{name}\n" for name in sorted(database.get_services()))
        if verb[0] == "describe":
            return _described(pool.FindMessageTypeByName(verb[1]))
        data = given if options.get("-d") == "@" else options.get("-d", "{}")
        service, _, name = verb[0].partition("/")
        return _called(channel, pool.FindServiceByName(service).methods_by_name[name], data)


def _described(message: Descriptor) -> str:
    fields = "".join(f"  {_type_of(one)} {one.name} = {one.number};\n" for one in message.fields)
    return f"{message.full_name} is a message:\nmessage {message.name} {{\n{fields}}}\n"


def _called(channel: grpc.Channel, method: MethodDescriptor, data: str) -> str:
    requests = _messages(method.input_type, data)
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    assert method.client_streaming or len(requests) == 1
    answer = call(iter(requests) if method.client_streaming else requests[0], timeout=DEADLINE_SECONDS)
    replies = list(answer) if method.server_streaming else [answer]
    replies.sort(key=lambda reply: getattr(reply, "request_id", 0))  # replies arrive as they are ready
    return "".join(f"{_printed(reply)}\n" for reply in replies)


def _messages(kind: Descriptor, text: str) -> list[Any]:
    """The consecutive JSON messages of a text. An unknown field is an error, as in grpcurl."""
    decoder, found, place = json.JSONDecoder(), [], 0
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        value, place = decoder.raw_decode(text, place)
        found.append(json_format.ParseDict(value, message_factory.GetMessageClass(kind)()))
    return found or [message_factory.GetMessageClass(kind)()]


def _printed(message: Any) -> str:
    return json.dumps(_sorted(json_format.MessageToDict(message)), indent=2, ensure_ascii=False)


def _sorted(value: Any, is_map: bool = False) -> Any:
    """Sorts maps by key and writes whole numbers without a decimal point, as grpcurl does."""
    if isinstance(value, dict):
        keys = sorted(value) if is_map else list(value)
        return {key: _sorted(value[key], key in _MAPS) for key in keys}
    if isinstance(value, list):
        return [_sorted(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _type_of(field: FieldDescriptor) -> str:
    name = f".{field.message_type.full_name}" if field.message_type is not None else _TYPES[field.type]
    return f"repeated {name}" if field.is_repeated else name
