"""Runs every command and program in docs/reward.md against a real service and inserts their output.

`python -m tests.support.reward_page` rewrites the page; tests/project/test_reward_document.py compares it.

A `console` block has commands after `$ ` and their output; a `text` block after a `python` block has that program's
output. Job ids, times and the port differ between runs, so the page has fixed values for them. Long outputs and lines
are cut. The lists after `<!-- scorers -->`, `<!-- limits -->` and `<!-- errors -->` are made from the code.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
from google.protobuf import descriptor_pb2, json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from typer.testing import CliRunner

from tandem.protos import errors
from tandem.reward.registry import SCORERS, describe
from tandem.services.cli import app
from tandem.services.clients import RewardClient
from tandem.services.commands.reward_display import number
from tests.support.paths import ROOT
from tests.support.reward_process import running_reward

PAGE = ROOT / "docs" / "reward.md"
SHOWN_ADDRESS = "127.0.0.1:50051"
SHOWN_IDS = ("0660ca468f1360c816690e7ac842a6a1", "0660ca47159750ed80bfe785e543c89b", "0660ca46c8d1f7a2b94e03d15c86f702")
SHOWN_TIME = "2026-11-21 14:35"
SHOWN_SECONDS = {"createdAt": "1795271712.25", "finishedAt": "1795271712.5", "expiresAt": "1795876512.5"}
MAX_LINES, MAX_COLUMNS = 20, 120
ERRORS = (
    *("DataError", "SizeError", "ScorerError", "UnknownJobError", "JobExistsError", "JobError", "JobLimitError"),
    *("EnvironmentLackError", "DeadlineError", "UnavailableError"),
)
WAIT_SECONDS = 60.0

_MAPS = ("breakdown", "limits", "numUnscored")
_TYPES = {number: name[5:].lower() for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_ID = re.compile(r"\b[0-9a-f]{32}\b")


@dataclass
class Reader:
    """Runs the page's commands in an empty folder."""

    address: str
    ids: dict[str, str] = field(default_factory=dict)
    """The page's fixed value for each job id."""

    def follow(self, page: str) -> str:
        """The page with the real output in place of the present one."""
        done = ""
        place, printed = 0, ""
        for block in _BLOCK.finditer(page):
            kind, text = block.groups()
            before = page[place : block.start()]
            if kind == "console":
                text = "".join(map(self._console, commands_of(text)))
            elif kind == "python":
                printed = self._python(text)
            elif kind == "text":
                text = printed
            elif kind == "toml" and (named := re.search(r"This is `(\w+\.toml)`:\s*\Z", before)):
                text = (ROOT / "examples" / "rubrics" / named[1]).read_text()
            done += f"{before}```{kind}\n{text}```"
            place = block.end()
        return self._with_lists(done + page[place:])

    def _console(self, command: str) -> str:
        real = command.replace(SHOWN_ADDRESS, self.address)
        for actual, shown in self.ids.items():
            real = real.replace(shown, actual)
        with RewardClient(self.address) as client:
            for job in client.jobs():
                client.wait(job.job_id, timeout_seconds=WAIT_SECONDS)  # so that its figures are equal in every run
        return f"$ {command}\n{self._shown(run(real, self.address))}"

    def _python(self, text: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(text.replace(SHOWN_ADDRESS, self.address), str(PAGE), "exec"), {"__name__": "page"})
        return self._shown(said.getvalue())

    def _shown(self, output: str) -> str:
        for found in _ID.findall(output):
            if found not in self.ids and found not in self.ids.values():
                self.ids[found] = SHOWN_IDS[len(self.ids)]
        output = _ID.sub(lambda found: self.ids.get(found[0], found[0]), output).replace(self.address, SHOWN_ADDRESS)
        output = re.sub(r"\b20\d\d-\d\d-\d\d \d\d:\d\d\b", SHOWN_TIME, output)
        for key, shown in SHOWN_SECONDS.items():
            output = re.sub(rf'"{key}": [\d.]+', f'"{key}": {shown}', output)
        lines = output.splitlines()
        if len(lines) > MAX_LINES:
            lines = [*lines[: MAX_LINES - 1], "…"]
        lines = [line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 1] + "…" for line in lines]
        return "".join(f"{line.rstrip()}\n" for line in lines)

    def _with_lists(self, page: str) -> str:
        """Fills the lists of scorers, limits and errors; keeps the page's explanation of each limit."""
        with RewardClient(self.address) as client:
            limits = client.scorers().limits
        scorers = describe()
        explained = dict(re.findall(r"^- `(\w+)` \([\d,.]+\): ((?:.+\n)(?:  .+\n)*)", page, re.M))
        classes = [getattr(errors, name) for name in ERRORS]
        lists = {
            "scorers": [f"`{one.name}` (version {one.version}, `{one.isolation}`): {one.summary}" for one in scorers],
            "limits": [f"`{one}` ({number(limits[one])}): {explained.get(one, '?')}" for one in in_order(limits)],
            "errors": [f"`{one.__name__}` (`{one.grpc_code}`): {inspect.getdoc(one)}" for one in classes],
        }
        for name, texts in lists.items():
            found = re.search(rf"(?<=<!-- {name} -->\n)(?:- .*\n(?:  .*\n)*)+", page)
            assert found, f"the page lacks the list of {name}"
            page = page[: found.start()] + "".join(f"{item(text)}\n" for text in texts) + page[found.end() :]
        return page


def in_order(limits: object) -> list[str]:
    return sorted(limits, key=lambda name: (not name.startswith("max_"), name))


def item(text: str) -> str:
    """The first paragraph of a text as an item of a list."""
    options = {"initial_indent": "- ", "subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(" ".join(text.partition("\n\n")[0].split()), MAX_COLUMNS, **options)


def commands_of(block: str) -> list[str]:
    """The commands of a block. A line that ends with a backslash continues, as does one with `<<'END'` until END."""
    found: list[str] = []
    continued = here_document = False
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
        elif continued or here_document:
            found[-1] += f"\n{line}"
        else:
            continue
        continued = line.endswith("\\")
        here_document = (here_document or "<<'END'" in line) and line != "END"
    return found


def run(command: str, address: str) -> str:
    """The output of the command, including errors."""
    head, _, given = command.partition(" <<'END'\n")
    words = shlex.split(head.replace("\\\n", " "))
    if words[:3] == ["tandem", "reward", "serve"]:
        return f"reward: listens on {address}\n"  # the fixture has started the service
    if words[0] == "grpcurl":
        return grpcurl(words[1:], given.removesuffix("END"))
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, timeout=60, check=True)
        return done.stdout
    assert words[0] == "tandem", command
    result = CliRunner().invoke(app, words[1:])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.output


@contextlib.contextmanager
def reading_folder(address: str) -> Iterator[None]:
    """An empty working folder with links to examples/ and protos/, and the address in the environment."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "protos"):
            (Path(folder) / name).symlink_to(ROOT / name)
        with contextlib.chdir(folder), mock.patch.dict(os.environ, TANDEM_REWARD_ADDRESS=address):
            yield


def followed() -> str:
    """The page with the real output."""
    with running_reward() as address, reading_folder(address):
        return Reader(address).follow(PAGE.read_text(encoding="utf-8"))


def remote_scorers() -> set[str]:
    """Scorers that clients can use only under a name that the service declares."""
    return {name for name, kind in SCORERS.items() if kind.ISOLATION == "remote"}


def grpcurl(words: list[str], given: str) -> str:
    """What grpcurl prints for these arguments, with `given` on standard input (`-d @`). It knows what the page uses: it
    learns the services by reflection, reads JSON and prints JSON.
    """
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
    answer = call(iter(requests) if method.client_streaming else requests[0], timeout=WAIT_SECONDS)
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


if __name__ == "__main__":
    PAGE.write_text(followed(), encoding="utf-8")
