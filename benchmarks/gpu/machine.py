"""What the machine has that the parts of `benchmarks/gpu_proof.py` need. Imports no torch: another process asks it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec

PROBE_SECONDS = 120.0
_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
print(json.dumps({
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": [[gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}"] for gpu in gpus],
}))
"""
_NAMED = ("triton", "transformers", "deepspeed", "flash_attn", "vllm", "numpy", "grpcio", "redis", "pydantic")


@dataclass(frozen=True)
class Machine:
    """Its GPUs and packages."""

    gpus: tuple[tuple[str, int, str], ...]
    """Name, bytes of memory and compute capability of each."""
    torch: str
    cuda: str | None
    driver: str

    def lacks(self, num_gpus: int, packages: Sequence[str]) -> str:
        """What of it is missing here; "" if nothing is."""
        if len(self.gpus) < num_gpus:
            seen = f"torch {self.torch} sees {len(self.gpus) or 'none'}"
            return "needs a CUDA device; " + seen if num_gpus == 1 else f"needs {num_gpus} CUDA devices; {seen}"
        absent = [name for name in packages if find_spec(name) is None]
        return f"needs {', '.join(absent)}, not installed here" if absent else ""

    def lines(self) -> list[str]:
        """The machine in Markdown."""
        gpus = [f"{name} ({memory / 2**30:.0f} GiB, sm_{cc.replace('.', '')})" for name, memory, cc in self.gpus]
        versions = [f"Python {platform.python_version()}", f"torch {self.torch}", f"CUDA {self.cuda or 'none'}"]
        versions += [f"driver {self.driver}"] if self.driver else []
        return [
            f"- GPUs: {', '.join(gpus) or 'none'}; {len(os.sched_getaffinity(0))} cores",
            f"- {', '.join(versions)}",
            f"- {', '.join(f'{name} {_installed(name)}' for name in _NAMED)}",
        ]


def probe_machine() -> Machine:
    """Asks torch in another process, and the driver."""
    done = subprocess.run([sys.executable, "-c", _PROBE], check=True, capture_output=True, timeout=PROBE_SECONDS)
    found = json.loads(done.stdout.splitlines()[-1])
    driver = ""
    if shutil.which("nvidia-smi") and found["gpus"]:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, check=True, capture_output=True, text=True, timeout=PROBE_SECONDS).stdout
    gpus = tuple((name, memory, capability) for name, memory, capability in found["gpus"])
    return Machine(gpus, found["torch"], found["cuda"], driver.partition("\n")[0])


def _installed(name: str) -> str:
    """The version of a module's distribution, which may have another name, as vLLM's for CPUs."""
    distribution, *_ = packages_distributions().get(name, [name])
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"
