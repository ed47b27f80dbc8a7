"""A Redis and a folder in memory for the tests that need one. Skips tests marked `gpu`, with the reason, where torch
sees no CUDA device.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("busy", deadline=None)  # other work on the machine must not fail a test
settings.register_profile("long", deadline=None, max_examples=1000)  # of the models that say so
settings.load_profile("busy")

# Before torch is loaded. As many processes as there are cores run tests: threads of one would spin against the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Caches that would be in the home folder, which may be read-only. All test runs of a user share them.
_CACHES = Path(tempfile.gettempdir(), f"tandem-test-caches-{os.getuid()}")
for _name in ("VLLM_CACHE_ROOT", "TRITON_HOME", "TORCH_EXTENSIONS_DIR", "HF_HOME"):
    os.environ.setdefault(_name, str(_CACHES / _name))

_DEPLOY = {"security", "deploy", "control", "dashboard", "launchers", "metrics", "planning"}
"""Folders of `make test-deploy`."""
_ROOTS = {Path(__file__).parent, Path(__file__).parent / "services"}
"""Where these folders lie."""
_WITHOUT_DEPLOY = {"not system and not slow and not deploy", "(system or slow) and not deploy"}
"""What `make test` and `make test-system` pass as -m. With any other expression, every folder is read."""


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for one file of tests, which need not survive a crash."""
    from tests.support.redis_ring import running_redis  # here, for most files need none

    with running_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is one: slow disks do not slow the test, and a killed process loses nothing."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place, prefix="tandem-") as folder:
        yield Path(folder)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the folders of `make test-deploy` where -m leaves out their tests: their imports take seconds."""
    in_deploy = collection_path.name in _DEPLOY and collection_path.parent in _ROOTS
    return True if in_deploy and config.option.markexpr in _WITHOUT_DEPLOY else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while modules are loaded, and looks at them never again. DeepSpeed collects all garbage
    several times when it builds an engine, which takes 0.3 s each time with everything that the tests load.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.parent.name in _DEPLOY:
        item.add_marker("deploy")


@pytest.hookimpl(trylast=True)  # after -m and -k: torch is imported only if a gpu test is really about to run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("loadscopereorder", True):  # as make test-system and make test-deploy
        _put_longest_files_first(items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


def _put_longest_files_first(items: list[pytest.Item]) -> None:
    """By the longest time-out in a file, so that no worker is left with a long test at the end."""
    longest: dict[Path, int] = {}
    for item in items:
        mark = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0), mark.args[0] if mark and mark.args else 0)
    items.sort(key=lambda item: -longest[item.path])
