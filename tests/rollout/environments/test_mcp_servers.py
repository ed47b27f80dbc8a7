"""Tools of MCP servers: a real one over its standard input and over HTTP, its end, and files that are wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.protos import extras
from tandem.protos.errors import ConfigError, EpisodeError
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.loading import ContractError
from tandem.rollout.environments.process import EnvironmentPool, check_class
from tandem.rollout.environments.tools.sources import load_tools
from tests.support.misbehaving_server import free_port
from tests.support.paths import ROOT
from tests.support.processes import wait_until_gone
from tests.support.tool_steps import TASK, call, reset, step
from tests.support.waiting import eventually

SERVER = f"{ROOT}/tests/support/mcp_server.py"


def write_file(folder: Path, **server: object) -> str:
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"codes": server}}))
    return f"{folder}/mcp.json"


def test_a_server_answers_calls_and_one_that_ends_costs_an_attempt_and_leaves_nothing(tmp_path: Path) -> None:
    variables = {"GREETING": "${LANG_OF_TEST:-hello}"}
    source = write_file(tmp_path, command=sys.executable, args=[SERVER, str(tmp_path)], env=variables)

    async def main() -> None:
        pool = EnvironmentPool(EnvironmentConfig(tools=(source,)))
        await pool.start()
        try:
            assert [tool["function"]["name"] for tool in pool.tools] == ["code", "pay", "remove", "fail", "greet"]
            assert [*pool.unsafe_tools] == ["pay"], "its annotation says that it is destructive"
            assert pool.tools[0]["function"]["description"] == "Tells the code of a name, which nobody else knows."
            first, second = await asyncio.gather(reset(pool, "one"), reset(pool, "two"))
            calls = [call("code", name="a"), call("code", name="b", times=2), call("code"), call("greet")]
            once, twice, missing, greeting = await step(first, calls)
            assert [once, twice] == [(tmp_path / "a").read_text(), 2 * (tmp_path / "b").read_text()]
            assert twice != 2 * once, "only the tool knows the code"
            assert missing == "error: bad_arguments: 'name' is a required property" and greeting == "hello"
            assert (await step(second, [call("fail", how="raise")]))[0].startswith("error: exception: ")
            late = await step(second, [call("fail", how="hang"), call("greet")], 2.0)
            assert late[0].startswith("error: timeout: ") and late[1] == "hello", "its other calls go on"
            with pytest.raises(EpisodeError, match=r'mcp\.json: the server "codes" has ended'):
                await step(second, [call("fail", how="die")])
            third = await reset(pool, "three")
            assert await step(third, [call("greet")]) == ["hello"], "the next episode starts it again"
            os.kill(pool._processes[0]._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
            started = (tmp_path / "pids").read_text().split()
            assert len(started) == 6, "once to list the tools, once for all episodes, once more after its end"
            for pid in started:
                await asyncio.to_thread(wait_until_gone, int(pid))
        finally:
            await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("effect", ["pure", "idempotent", "unsafe", None])
def test_a_server_has_the_effect_that_its_file_declares(tmp_path: Path, effect: str | None) -> None:
    declared = {} if effect is None else {"effect": effect}
    source = write_file(tmp_path, command=sys.executable, args=[SERVER, str(tmp_path)], **declared)
    tools = load_tools((source,))
    told = ["pure", "unsafe", "idempotent", "idempotent", "idempotent"]  # by their annotations
    expected = told if effect is None else [effect] * len(told)
    assert [tool.effect for tool in tools.values()] == expected
    assert [tool.parallel for tool in tools.values()] == [one == "pure" for one in expected]


def test_a_server_is_reached_over_http(tmp_path: Path) -> None:
    port = free_port()
    source = write_file(tmp_path, type="http", url=f"http://127.0.0.1:{port}/mcp", headers={"X-Key": "${KEY:-none}"})
    command = [sys.executable, SERVER, str(tmp_path), str(port)]
    with subprocess.Popen(command, env={**os.environ, "GREETING": "hi"}) as server:
        try:
            eventually(lambda: listens(port))
            tool = load_tools((source,))["greet"]

            async def main() -> str:
                instance = await tool.create(TASK)
                return (await tool.execute(instance, {}, seconds=20.0, max_chars=100)).text

            assert asyncio.run(main()) == "hi"
        finally:
            server.kill()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({"command": "no-such-command"}, "does not start: the command 'no-such-command' is not found"),
        ({"command": "false"}, "does not start: Connection closed"),
        ({"url": "http://127.0.0.1:9/mcp"}, "does not start: All connection attempts failed"),
        ({}, "needs either a command or a url"),
        ({"command": "a", "args": "b"}, "args: Input should be a valid list"),
        (
            {"url": "${NO_SUCH_URL}"},
            "the environment variable NO_SUCH_URL is not set; name it in environment.variables",
        ),
        ({"command": "a", "effect": "none"}, "effect: Input should be 'pure', 'idempotent' or 'unsafe'"),
        ({"url": "http://127.0.0.1:9/sse", "type": "sse"}, "its type is 'sse'; stdio and http are known"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, server: dict[str, object], told: str
) -> None:
    source = write_file(tmp_path, **server)
    with pytest.raises(ContractError) as refused:
        load_tools((f"{source}:codes",))
    assert str(refused.value).replace(": ", " ").startswith(f'{source} the server "codes" {told}'.replace(": ", " "))
    assert "\n" not in str(refused.value)


def test_a_wrong_file_is_refused_and_the_package_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_file(tmp_path, command="false")
    with pytest.raises(ContractError, match="there is no server code; there is codes"):
        load_tools((f"{source}:code",))
    with pytest.raises(ConfigError, match=r"^environment\.tools: [^\n]*does not start: Connection closed$"):
        asyncio.run(check_class(EnvironmentConfig(tools=(source,))))
    (tmp_path / "mcp.json").write_text("{}")
    with pytest.raises(ContractError, match="has no object `mcpServers` with servers"):
        load_tools((source,))
    with pytest.raises(ContractError, match=r"missing\.json: no such file"):
        load_tools(("missing.json",))
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ContractError, match=r"mcp is not installed; install it: pip install 'tandem-rl\[mcp\]'"):
        load_tools((source,))
