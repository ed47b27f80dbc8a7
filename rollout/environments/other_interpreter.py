"""Runs environments under another interpreter than Tandem's, e.g. one of a virtual environment with other packages:

    /path/to/venv/bin/python rollout/environments/other_interpreter.py

Tandem need not be installed there. It is imported from beside this file, and nothing else is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path


def import_tandem() -> None:
    """Makes `import tandem` find the package to which this file belongs."""
    floors = Path(__file__).resolve().parents[2]
    package = floors if (floors / "__init__.py").is_file() else floors / "tandem"  # installed, or in the sources
    spec = importlib.util.spec_from_file_location(
        "tandem", package / "__init__.py", submodule_search_locations=[str(floors)]
    )
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules["tandem"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # as with `python -m`; the names beside this file are no modules of the user's
    import_tandem()
    importlib.import_module("tandem.rollout.environments.inside").main()
