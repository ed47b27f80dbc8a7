"""A Redis with the users of deploy/redis/users.acl and with TLS: Tandem does all its work there, and no more than that.

The scenarios are the tests of the buffer and of the job store that need nothing but one.
"""

from __future__ import annotations

import ast
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import resources
from pathlib import Path
from types import ModuleType

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tandem.protos.errors import ConfigError, EnvironmentLackError, TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.connection import RUNS, Connection
from tandem.services.buffer.durability import check_settings
from tandem.services.command_line import exit_code_of
from tandem.services.commands.certs import write_certificates
from tandem.services.reward.jobs.store import JobStore
from tests.services.buffer import test_buffer, test_ledger_laws
from tests.services.reward.conftest import new_store
from tests.services.reward.jobs import test_job_store
from tests.support import redis_ring as ring
from tests.support.locked_redis import ACL_FILE, LockedRedis, locked_redis, tls_before
from tests.support.paths import ROOT

PASSWORD = "a/p@ss:w?rd#%& of the test"
COMMANDS = {"delete": {"del"}, "register_script": {"evalsha", "script|load"}, "config_get": set()}
COMMANDS |= {name: set() for name in ("close", "pipeline", "execute")}
"""Of methods of redis-py that are not named after their command. Tandem does without `config_get` if it is refused."""


@pytest.fixture(scope="module")
def server() -> Iterator[LockedRedis]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, locked_redis(Path(folder), PASSWORD) as running:
        yield running


@pytest.fixture(scope="module")
def admin(server: LockedRedis) -> Iterator[redis.Redis]:
    with closing(server.admin()) as client:
        yield client


def allowed() -> set[str]:
    """The commands that the file allows."""
    (line,) = [line for line in ACL_FILE.read_text().splitlines() if line.startswith("user tandem ")]
    return {word.removeprefix("+") for word in line.split() if word.startswith("+")}


def in_scripts() -> set[str]:
    """The commands in the scripts: what stands in capitals before the first comma of a call."""
    packages = ("tandem.services.buffer.scripts", "tandem.services.reward.jobs.scripts")
    files = [file for package in packages for file in resources.files(package).iterdir() if file.name.endswith(".lua")]
    calls = [call for file in files for call in re.findall(r"redis\.p?call\(([^,)]*)", file.read_text())]
    assert len(calls) > 100
    return {name.lower() for call in calls for name in re.findall(r"'([A-Z]+)'", call)}


def of_method(name: str) -> set[str]:
    return COMMANDS.get(name, {name.removesuffix("_iter")})


def called_from_python() -> set[str]:
    """The commands that the services call by methods of `redis`, `….redis` or a pipeline, and `select`, which the URL
    causes.
    """
    called = {"select"}
    for file in (ROOT / "services").rglob("*.py"):
        used = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        methods = [
            node.attr for node in used if re.search(r"(\b_?redis|^pipeline|^Pipeline)$", ast.unparse(node.value))
        ]
        called |= {command for name in methods if hasattr(redis.Redis, name) for command in of_method(name)}
    return called


# ---- the user can do all that Tandem does ----


def test_the_file_allows_what_the_code_calls_and_nothing_else() -> None:
    assert allowed() == in_scripts() | called_from_python()


def scenarios(module: ModuleType, fixture: str) -> list[Callable[..., None]]:
    """The tests of a module that take this fixture alone."""
    tests = [one for name, one in vars(module).items() if name.startswith("test_") and callable(one)]
    return [one for one in tests if list(inspect.signature(one).parameters) == [fixture]]


def named(test: Callable[..., None]) -> str:
    return test.__name__


OF_BUFFER = [*scenarios(test_buffer, "buffer"), *scenarios(test_ledger_laws, "buffer")]
OF_JOBS = scenarios(test_job_store, "store")


@pytest.mark.parametrize("scenario", OF_BUFFER, ids=named)
def test_the_buffer_works_for_the_user(server: LockedRedis, scenario: Callable[[Buffer], None]) -> None:
    options = {"staleness_budget": 3} if scenario.__module__ == test_ledger_laws.__name__ else {}
    with closing(ring.new_run(server.url(), **options)) as buffer:
        scenario(buffer)
        assert buffer.verify() == []
        buffer.secret()
        buffer.silences()
        buffer.delete()
        assert not buffer.exists()


@pytest.mark.parametrize("scenario", OF_JOBS, ids=named)
def test_jobs_work_for_the_user(server: LockedRedis, scenario: Callable[[JobStore], None]) -> None:
    with closing(new_store(server.url())) as store:
        scenario(store)


def test_the_scenarios_above_are_enough(server: LockedRedis, admin: redis.Redis) -> None:
    """They run most of the commands, and Redis refuses nothing but what Tandem can do without."""
    for scenario in OF_BUFFER:  # again: another process may have run those above, on a server of its own
        test_the_buffer_works_for_the_user(server, scenario)
    for scenario in OF_JOBS:
        test_jobs_work_for_the_user(server, scenario)
    ran = {name.removeprefix("cmdstat_") for name in admin.info("commandstats")}
    known = {name.partition("|")[0] for name in allowed()}
    assert len(known & ran) >= 0.9 * len(known), known - ran
    refused = {entry["object"].partition("|")[0] for entry in admin.acl_log() if entry["username"] == "tandem"}
    assert refused <= {"client"}, "only the name of the client library could not be told"


def test_the_check_of_durability_says_what_it_could_not_see(server: LockedRedis) -> None:
    with closing(Connection(server.url(), "checked", RUNS)) as connection:
        (line,) = check_settings(connection)
    assert "appendfsync could not be checked: it refuses CONFIG GET" in line


def test_a_restarted_redis_knows_what_it_knew() -> None:
    """Redis replays its append-only file as the user `default`, and skips transactions with commands denied to it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        for start in range(2):
            with locked_redis(Path(folder), PASSWORD) as server:
                if start == 0:
                    with closing(ring.new_run(server.url(), run_id="kept")) as buffer:
                        ring.offer(buffer, 5)
                        before = buffer.counts()
                with closing(Buffer(server.url(), "kept")) as buffer:
                    assert buffer.counts() == before and before["prompts_waiting"]
                    assert buffer.verify() == []
                with closing(server.admin()) as client:  # Redis 6 loads all without these rights, Redis 7 does not
                    (default,) = [line for line in client.acl_list() if line.startswith("user default ")]
                assert default.split()[2:] == ["off", "sanitize-payload", "~*", "&*", "+@all"], "no password"


# ---- and nothing else ----


def test_every_other_command_is_refused(server: LockedRedis, admin: redis.Redis) -> None:
    anybody = {"auth", "hello", "reset", "quit"}
    others = {name: about for name, about in admin.command().items() if name not in allowed() | anybody | {"script"}}
    assert {"flushall", "flushdb", "config", "shutdown", "module", "debug", "save", "bgsave", "keys", "eval"} < set(
        others
    )
    assert {"replicaof", "acl", "monitor", "client", "migrate", "restore", "subscribe", "swapdb"} < set(others)
    with closing(redis.Redis.from_url(server.url(), protocol=2)) as client:
        for name, about in others.items():
            arguments = ["tandem:{x}:a"] * (abs(about["arity"]) - 1)
            with pytest.raises(redis.ResponseError, match="no permissions to run"):
                client.execute_command(name, *arguments)
        for more in (["SCRIPT", "FLUSH"], ["SCRIPT", "KILL"], ["CONFIG", "SET", "dir", "/"], ["SAVE"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*more)


def test_keys_of_others_are_refused(server: LockedRedis, admin: redis.Redis) -> None:
    admin.set("another:key", "kept")
    with closing(redis.Redis.from_url(server.url(), protocol=2)) as client:
        for call in (
            lambda: client.get("another:key"),
            lambda: client.set("another:key", ""),
            lambda: client.mget(["tandem:{x}:a", "another:key"]),
            lambda: client.unlink("another:key"),
            lambda: client.blpop(["another:key"], timeout=1),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                call()
        for command in ("'GET', 'another:key'", "'FLUSHALL'", "'CONFIG', 'GET', '*'"):
            script = client.register_script(f"return redis.call({command})")
            with pytest.raises(redis.ResponseError, match=r"can't|not allowed from script|ACL failure"):
                script(keys=["tandem:{x}:a"])
    assert admin.get("another:key") == b"kept"


def test_nobody_enters_without_a_password(server: LockedRedis) -> None:
    stranger = redis.Redis(unix_socket_path=str(server.socket), retry=Retry(NoBackoff(), 0))
    with closing(stranger), pytest.raises(redis.AuthenticationError):
        stranger.ping()


# ---- TLS ----


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    write_certificates(folder, [], 1)
    return folder


@pytest.fixture(scope="module")
def tls_url(server: LockedRedis, certificates: Path) -> Iterator[str]:
    """Where the user finds the server by TLS; the rest of the URL follows."""
    with tls_before(server.socket, certificates) as port:
        yield server.url().partition("@")[0].replace("unix://", "rediss://") + f"@127.0.0.1:{port}/1"


def test_the_buffer_works_by_tls(tls_url: str, certificates: Path) -> None:
    with closing(ring.new_run(f"{tls_url}?ssl_ca_certs={certificates / 'ca.crt'}")) as buffer:
        test_ledger_laws.test_a_version_is_recorded_published_and_committed(buffer)


def fault_of(url: str) -> str:
    """The line about a Redis that cannot be used, for which commands exit with 2."""
    with pytest.raises(TandemError) as refused:
        Connection(url, "run", RUNS).close()
    error = refused.value
    line = str(error)
    assert isinstance(error, ConfigError | EnvironmentLackError) and "\n" not in line
    assert exit_code_of(lambda: Connection(url, "run", RUNS).close()) == 2
    assert "a%2Fp" not in line and PASSWORD not in line
    return line


def test_a_wrong_authority_is_one_line(tls_url: str, certificates: Path, tmp_path: Path) -> None:
    write_certificates(tmp_path, [], 1)
    for url in (tls_url, f"{tls_url}?ssl_ca_certs={tmp_path / 'ca.crt'}"):
        line = fault_of(url)
        assert "its certificate is not trusted (" in line and "?ssl_ca_certs=FILE" in line


@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
def test_a_missing_file_is_one_line(tls_url: str, name: str) -> None:
    assert f"{name}=/nowhere.pem in its URL is no file" in fault_of(f"{tls_url}?{name}=/nowhere.pem")


def test_a_file_without_a_certificate_is_one_line(tls_url: str, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    assert "TLS fails" in fault_of(f"{tls_url}?ssl_ca_certs={tmp_path / 'empty.pem'}")


def test_a_wrong_password_is_one_line(server: LockedRedis, tls_url: str, certificates: Path) -> None:
    assert "refuses this user" in fault_of(server.url(password="wrong"))
    right = f"{tls_url}?ssl_ca_certs={certificates / 'ca.crt'}"
    assert "refuses this user" in fault_of(right.replace("tandem:", "nobody:"))


def test_a_user_without_rights_is_one_line(server: LockedRedis, admin: redis.Redis) -> None:
    admin.acl_setuser("guest", enabled=True, passwords=["+guest"], categories=["-@all"], commands=["+select"])
    assert "this user lacks rights (" in fault_of(server.url("guest", "guest"))
    admin.acl_setuser("guest", enabled=True, commands=["+info", "+evalsha", "+script"], keys=["*"])
    told = pytest.raises(EnvironmentLackError, match=r"lacks rights .*deploy/redis/users\.acl")
    with closing(Buffer(server.url("guest", "guest"), "guest")) as buffer, told as refused:
        buffer.counts()
    assert "\n" not in str(refused.value)
