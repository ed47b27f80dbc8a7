"""What somebody on the same machine without a token or a password tries at a listening port."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import psutil

_SECONDS = 0.5
_WORDS = (
    b"\x00\xce\xf7\x85\x3c\x0d\x01\x02\x03\x04",  # the greeting of torch's TCPStore, and a ping, which it returns
    b"PING\r\n",  # Redis
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x80\x04K\x01." * 8,  # pickles
)


def listening_ports(process: psutil.Process) -> set[tuple[str, int]]:
    """The addresses at which the process accepts TCP connections."""
    found = process.net_connections("tcp")
    return {(str(one.laddr.ip), int(one.laddr.port)) for one in found if one.status == psutil.CONN_LISTEN}


def answering(ports: Iterable[tuple[str, int]]) -> set[tuple[str, int]]:
    """The ports from which anything comes back for any of these words."""
    tries = [(port, words) for port in ports for words in _WORDS]
    with ThreadPoolExecutor(max_workers=32) as threads:
        return {port for (port, _), answers in zip(tries, threads.map(_answers, tries), strict=True) if answers}


def _answers(attempt: tuple[tuple[str, int], bytes]) -> bool:
    (host, port), words = attempt
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_SECONDS) as stranger:
        stranger.sendall(words)
        return bool(stranger.recv(1))
    return False
