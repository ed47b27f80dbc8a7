"""What the source of a class says about it: the summary of its docstring, and the string below each field."""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import suppress
from functools import cache


def summary(kind: type) -> str:
    """The first paragraph of a class's docstring, in one line."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def attribute_docs(kind: type) -> dict[str, str]:
    """The string below each field of a class, its own or inherited, in one line. Empty if there is no source."""
    docs: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        with suppress(OSError, TypeError):
            docs |= _own_docs(owner)
    return docs


@cache  # reading and parsing source takes long, and subclasses share their bases
def _own_docs(kind: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[field.target.id] = " ".join(after.value.value.split())
    return docs
