"""Advises bfloat16 to a run on CPUs where it is faster than float32. The recipe decides: a run's mathematics must not
depend on the machine that it starts on.
"""

from __future__ import annotations

from pathlib import Path

from tandem.services.config import Recipe
from tandem.services.run.model_check import ModelFacts
from tandem.services.run.placement import gpu_ids

WIDE = 512
"""Hidden size from which a forward and backward pass in bfloat16 is faster on CPUs with AMX (benchmarks/dtypes.py)."""
_PROCESSORS = Path("/proc/cpuinfo")


def has_amx() -> bool:
    """Whether this machine's processors multiply matrices in bfloat16 with AMX."""
    try:
        lines = _PROCESSORS.read_text("utf-8").splitlines()
    except OSError:
        return False
    return any("amx_bf16" in line.split() for line in lines if line.startswith("flags"))


def dtype_hint(recipe: Recipe, facts: ModelFacts | None) -> str:
    """What to tell a run on this machine that trains in float32 although bfloat16 is faster; "" if there is nothing,
    or if the model is unknown.
    """
    is_wide = facts is not None and facts.hidden_size >= WIDE
    if recipe.trainer.dtype != "float32" or gpu_ids() or not is_wide or not has_amx():
        return ""
    return (
        "trainer.dtype is float32: this processor has AMX, so a model of this width trains faster in bfloat16; "
        "`tandem replay --generation` cannot compare such a run (docs/speed.md)"
    )
