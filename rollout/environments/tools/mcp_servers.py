"""Tools of MCP servers, which a JSON file names in the form that MCP clients share: `{"mcpServers": {name: {…}}}`.

A server is started, or connected to, once to list its tools, and then once for all episodes of a process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from tandem.protos.contracts import JsonObject, ToolEffect
from tandem.protos.errors import EnvironmentLackError
from tandem.protos.extras import require_installed
from tandem.rollout.environments.loading import ContractError, described
from tandem.rollout.environments.tools import bound_command
from tandem.rollout.environments.tools.forked_call import RaisedError
from tandem.rollout.environments.tools.schema_arguments import SchemaArguments
from tandem.rollout.environments.tools.tool import Instance, Tool, ToolResult, shortened

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult
    from mcp_types import Tool as ListedTool

log = logging.getLogger(__name__)

_START_SECONDS = 25.0  # some servers are installed by their command; the process has 60 s for this and the list
_CLOSE_SECONDS = 5.0
_MAX_PAGES = 100
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


class McpServerError(ContractError):
    """A server does not start, or has ended. The message names it and its file."""


class _Settings(BaseModel):
    """One server of the file. Other keys are those of other clients."""

    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    type: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    effect: ToolEffect | None = None
    """Of all its tools, in place of what they say."""


class _Connection:
    """A running server. All belongs to one task, as the `mcp` package demands. Made in an event loop."""

    def __init__(self, server: _Server) -> None:
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(server))

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)  # a remote server may not answer

    async def _keep(self, server: _Server) -> None:
        """Until it is cancelled. A fault of the start is the result of `client`."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(_START_SECONDS):
                    client = await stack.enter_async_context(await server.new_client(stack))
                self.client.set_result(client)
                await asyncio.get_running_loop().create_future()
        except Exception as error:
            if self.client.done():
                log.warning("%s: its connection ended: %s", server.path, described(_first(error)))
                return
            late = f"it did not answer within {_START_SECONDS:.0f} s"
            why = late if isinstance(error, TimeoutError) else str(_first(error)) or type(error).__name__
            self.client.set_exception(McpServerError(f"{server.path} does not start: {' '.join(why.split())}"))


class _Server:
    """A server and its connection of this process, which is made anew when it has ended."""

    def __init__(self, path: str, settings: _Settings) -> None:
        self.path = path
        self.settings = settings
        self._connection: _Connection | None = None

    async def connected(self) -> _Connection:
        """Raises McpServerError if the server does not start."""
        if self._connection is None or self._connection.has_ended:
            self._connection = _Connection(self)
        connection = self._connection
        await asyncio.shield(connection.client)  # others may wait for it
        return connection

    async def drop(self, connection: _Connection) -> None:
        """Closes a connection that has failed; the next episode makes another one."""
        if self._connection is connection:
            self._connection = None
        await connection.close()

    async def new_client(self, stack: AsyncExitStack) -> Client:
        """A client that is not yet connected. Raises McpServerError if the command is not found."""
        import httpx2  # comes with mcp
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        settings = self.settings
        if settings.url:
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=settings.headers, timeout=None))
            return Client(streamable_http_client(settings.url, http_client=http))
        env = {**os.environ, **settings.env}
        if shutil.which(settings.command, path=env.get("PATH")) is None:
            raise McpServerError(f"the command {settings.command!r} is not found")
        bound = ["-S", "-E", bound_command.__file__, str(os.getpid()), settings.command, *settings.args]
        return Client(StdioServerParameters(command=sys.executable, args=bound, env=env, cwd=settings.cwd))


class McpTool(Tool):
    """A tool of a server. It may run beside other calls of its turn if it only reads."""

    def __init__(self, server: _Server, listed: ListedTool) -> None:
        function = {
            "name": listed.name,
            "description": listed.description or "",
            "parameters": listed.input_schema,
        }
        schema: JsonObject = {"type": "function", "function": function}
        effect = server.settings.effect or _effect_of(listed)
        super().__init__(schema, SchemaArguments(schema, server.path), effect == "pure", effect)
        self.keeps_state = effect != "pure"
        self._server = server

    async def create(self, task: JsonObject) -> Instance:
        await self._server.connected()
        return Instance("", {})

    async def execute(
        self, instance: Instance, arguments: Mapping[str, object], *, seconds: float, max_chars: int
    ) -> ToolResult:
        """Raises McpServerError if the server has ended, which is no fault of the call."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        connection = await self._server.connected()
        try:
            async with asyncio.timeout(seconds):
                result = await connection.client.result().call_tool(self.name, dict(arguments))
        except TimeoutError:
            raise
        except Exception as error:
            if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED and str(error) != "Session terminated":
                raise RaisedError(str(error)) from None
            if isinstance(error, ValidationError | RuntimeError):  # its answer is not as its schema or MCP say
                raise RaisedError(described(error)) from None
            await self._server.drop(connection)
            raise McpServerError(f"{self._server.path} has ended or is out of reach: {error}") from None
        if result.is_error:
            raise RaisedError(_text(result))
        return ToolResult(shortened(_text(result), max_chars))


def _effect_of(listed: ListedTool) -> ToolEffect:
    """What the server says of a tool."""
    hints = listed.annotations
    if hints is not None and hints.read_only_hint is True:
        return "pure"
    destroys = hints is not None and hints.destructive_hint is True and hints.idempotent_hint is not True
    return "unsafe" if destroys else "idempotent"


def load_mcp_tools(source: str) -> list[Tool]:
    """The tools of all servers of `file.json`, or of one: `file.json:name`. Raises ContractError.

    It starts each server, and ends it after it has listed its tools.
    """
    try:
        require_installed("mcp")
    except EnvironmentLackError as error:
        raise ContractError(f"{source}: {error}") from None
    servers = _servers(source)
    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        listed = thread.submit(lambda: asyncio.run(_listed(servers))).result()
    return [McpTool(server, tool) for server, tools in zip(servers, listed, strict=True) for tool in tools]


def _servers(source: str) -> list[_Server]:
    file, _, wanted = (source, "", "") if source.endswith(".json") else source.rpartition(":")
    try:
        content = json.loads(Path(file).read_text("utf-8"))
    except FileNotFoundError:
        raise ContractError(f"{source}: no such file (looked in {Path.cwd()})") from None
    except (OSError, ValueError) as error:
        raise ContractError(f"{source} cannot be read: {' '.join(str(error).split())}") from None
    entries = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise ContractError(f"{source} has no object `mcpServers` with servers")
    if wanted and wanted not in entries:
        raise ContractError(f"{source}: there is no server {wanted}; there is {', '.join(entries)}")
    names = [wanted] if wanted else entries
    return [_Server(path, _settings(entries[name], path)) for name in names if (path := f'{file}: the server "{name}"')]


def _settings(entry: object, path: str) -> _Settings:
    try:
        settings = _Settings.model_validate(_expanded(entry, path))
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(map(str, fault["loc"]))
        raise ContractError(f"{path}: {place + ': ' if place else ''}{fault['msg']}") from None
    if bool(settings.command) == bool(settings.url):
        raise ContractError(f"{path} needs either a command or a url")
    if settings.type not in ("", "stdio", "http", "streamable-http", "streamableHttp"):
        raise ContractError(f"{path}: its type is {settings.type!r}; stdio and http are known")
    return settings


def _expanded(value: object, path: str) -> object:
    """With the values of variables in place of `${NAME}` and `${NAME:-default}`."""

    def variable(found: re.Match[str]) -> str:
        text = os.environ.get(found[1], found[2])
        if text is None:
            told = f"the environment variable {found[1]} is not set; name it in environment.variables"
            raise ContractError(f"{path}: {told}")
        return text

    if isinstance(value, str):
        return _VARIABLE.sub(variable, value)
    if isinstance(value, dict):
        return {key: _expanded(one, path) for key, one in value.items()}
    return [_expanded(one, path) for one in value] if isinstance(value, list) else value


async def _listed(servers: Sequence[_Server]) -> list[list[ListedTool]]:
    return await asyncio.gather(*(_tools_of(server) for server in servers))


async def _tools_of(server: _Server) -> list[ListedTool]:
    connection = await server.connected()
    try:
        client, tools, cursor = connection.client.result(), [], None
        async with asyncio.timeout(_START_SECONDS):
            for _ in range(_MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                if (cursor := page.next_cursor) is None:
                    break
    except Exception as error:
        raise McpServerError(f"{server.path} does not list its tools: {described(_first(error))}") from None
    finally:
        await server.drop(connection)
    if not tools:
        raise McpServerError(f"{server.path} has no tools")
    return tools


def _text(result: CallToolResult) -> str:
    """What the policy reads: texts, and the kind of what is no text."""
    texts = []
    for part in result.content:
        inner = getattr(part, "resource", part)
        text = getattr(inner, "text", None)
        texts.append(text if isinstance(text, str) else f"[{part.type}, which is no text]")
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


def _first(error: BaseException) -> BaseException:
    """The first one of a group, which says what happened."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
