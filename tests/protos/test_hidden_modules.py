from __future__ import annotations

import importlib
import sys

import pytest

from tandem.protos.hidden_modules import hidden_module

MODULE = "this"


def test_a_hidden_module_cannot_be_imported_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ImportError), hidden_module(MODULE):
        importlib.import_module(MODULE)
    assert importlib.import_module(MODULE).__name__ == MODULE


def test_a_loaded_module_stays_visible() -> None:
    loaded = importlib.import_module(MODULE)
    with hidden_module(MODULE):
        assert importlib.import_module(MODULE) is loaded
    assert sys.modules[MODULE] is loaded
