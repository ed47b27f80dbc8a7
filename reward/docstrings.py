"""What a scorer's source says of it: the summary and example of its docstring, the string below each parameter."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any


def summary(kind: type[Any]) -> str:
    """The first paragraph of a class's docstring, in one line."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def attribute_docs(kind: type[Any]) -> Mapping[str, str]:
    """The string below each field of a class, its own or inherited, in one line. A field without one is missing here."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if owner is not object:
            docs |= _own_docs(owner)
    return docs


def _own_docs(kind: type[Any]) -> dict[str, str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return {}  # installed without its source: the parameters go without their words
    body = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[field.target.id] = " ".join(after.value.value.split())
    return docs
