"""Fixtures for attacks on sandboxes: every kind of isolation, with and without the system call filter.

Every test run attacks the kind that this machine uses. The slow tests attack the other kinds.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tandem.reward.sandbox import isolation
from tandem.reward.sandbox.inside import seccomp as filter_program
from tandem.reward.sandbox.isolation import SandboxPool, find_isolation, open_sandboxes
from tandem.reward.sandbox.launcher import BubblewrapEachLauncher, BubblewrapLauncher, ZygoteLauncher, layout_for
from tandem.reward.sandbox.sandbox import Limits, Outcome, Sandbox, SandboxError
from tests.support.sandbox_runs import ATTEMPT, LIMITS, SECRET, Launcher, Run

_NAMES = {ZygoteLauncher: "namespaces", BubblewrapLauncher: "bubblewrap", BubblewrapEachLauncher: "bubblewrap for each"}


def _in_force() -> object:
    find_isolation()
    return isolation._found and isolation._found[1]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, id=name, marks=[] if kind is _in_force() else pytest.mark.slow)
        for kind, name in _NAMES.items()
    ],
)
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    os.environ["TANDEM_TEST_SECRET"] = SECRET
    try:
        made: Launcher = request.param(layout_for())
    except SandboxError as error:
        pytest.skip(f"it does not work here: {error}")
    finally:
        del os.environ["TANDEM_TEST_SECRET"]
    with closing(made):
        try:
            with closing(made.open(seccomp=False)) as first:
                first.await_ready(60.0)
        except SandboxError as error:
            pytest.skip(f"it does not work here: {error}")
        isolation._prove(made)  # a kind that works here must also isolate
        yield made


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[SandboxPool]:
    """A pool whose sandboxes a zygote forks. It replaces what the tests of a module kill."""
    with closing(open_sandboxes(allow_unsandboxed=True)) as made:
        if not isinstance(made._launcher, ZygoteLauncher):
            pytest.skip(f"elsewhere every sandbox has a process of its own: {find_isolation()}")
        yield made


@pytest.fixture(params=["filtered", "unfiltered"])
def filtered(request: pytest.FixtureRequest) -> bool:
    if request.param == "filtered" and not filter_program.available():
        pytest.skip(f"no filter of system calls is known for {os.uname().machine}")
    return bool(request.param == "filtered")


@pytest.fixture
def open_one(launcher: Launcher, filtered: bool) -> Iterator[Callable[[], Sandbox]]:
    opened: list[Sandbox] = []

    def make() -> Sandbox:
        opened.append(launcher.open(seccomp=filtered))
        opened[-1].await_ready(60.0)
        return opened[-1]

    yield make
    for sandbox in opened:
        sandbox.close()


@pytest.fixture
def sandbox(open_one: Callable[[], Sandbox]) -> Sandbox:
    return open_one()


@pytest.fixture
def run(sandbox: Sandbox) -> Run:
    def go(program: str, limits: Limits = LIMITS) -> Outcome:
        return sandbox.run("script", [ATTEMPT, program], limits)

    return go


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the service's user."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait(timeout=30)
