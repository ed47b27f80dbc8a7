"""An MCP server for the tests: `python mcp_server.py FOLDER [PORT]`. The folder gets its process id."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

FOLDER = Path(sys.argv[1])
server = MCPServer("test", log_level="ERROR")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def code(name: str, times: int = 1) -> str:
    """Tells the code of a name, which nobody else knows."""
    value = secrets.token_hex(4)
    (FOLDER / name).write_text(value)
    return value * times


@server.tool(annotations=ToolAnnotations(destructive_hint=True))
def pay(amount: int) -> str:
    """Takes money, each time that it is called."""
    return f"{amount} paid"


@server.tool(annotations=ToolAnnotations(destructive_hint=True, idempotent_hint=True))
def remove(name: str) -> str:
    """Removes a name; a second call changes nothing more."""
    (FOLDER / name).unlink(missing_ok=True)
    return "removed"


@server.tool()
def fail(how: str) -> str:
    """Fails."""
    if how == "die":
        os._exit(3)
    if how == "hang":
        time.sleep(3600)
    raise ToolError("no such name")


@server.tool()
def greet() -> str:
    """Greets in the words of its variable."""
    return os.environ["GREETING"]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        with open(FOLDER / "pids", "a") as pids:
            pids.write(f"{os.getpid()} {subprocess.Popen(['sleep', '3600']).pid}\n")
        server.run()
