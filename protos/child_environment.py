"""The environment of processes that run users' functions: of this process's variables, those that are listed here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from tandem.protos.errors import ConfigError
from tandem.protos.secret_values import is_secret_name, without_passwords

_PASSED = re.compile(
    # The system, the user, the interpreter.
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|XDG_\w+|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|MALLOC_\w+|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX"
    # The network: proxies and certificate authorities.
    r"|(https?|all|no|HTTPS?|ALL|NO)_(proxy|PROXY)|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    # Numerical libraries, devices, process groups, models.
    r"|(OMP|KMP|GOMP|MKL|OPENBLAS|BLIS|NUMEXPR|VECLIB|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|CUDA|NVIDIA|NCCL"
    r"|GLOO|HIP|ROCR|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|NLTK|TANDEM)_\w+"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REDIS = "TANDEM_REDIS_URL"
HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""With which libraries log in at Hugging Face's hub."""


def child_environment(declared: Iterable[str] = (), key: str = "reward.environment") -> dict[str, str]:
    """The variables of this process that a process with users' functions gets: listed ones without a secret in name or
    value, and those that the recipe declares by `key`. Raises ConfigError for a declared one that is not set.
    """
    passed = {name: value for name, value in os.environ.items() if _is_harmless(name, value)}
    for name in declared:
        if not _NAME.fullmatch(name) or name not in os.environ:
            raise ConfigError(f"{key}: the environment variable {name!r:.80} is not set")
        passed[name] = os.environ[name]
    return passed


def drop_secrets(kept: Iterable[str] = ()) -> None:
    """Removes the secrets but the hub's and the `kept` ones from this process's variables, so that no process it starts
    gets them.
    """
    spared = HUB_TOKENS.union(kept)
    for name in [name for name in os.environ if name == _REDIS or (is_secret_name(name) and name not in spared)]:
        del os.environ[name]


def _is_harmless(name: str, value: str) -> bool:
    listed = _PASSED.fullmatch(name) is not None and name != _REDIS and not is_secret_name(name)
    return listed and without_passwords(value) == value
