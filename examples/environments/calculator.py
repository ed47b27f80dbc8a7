"""A tool: a calculator, for examples/recipes/gsm8k_calculator.toml."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from tandem import parallel_tool

OPERATIONS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


@parallel_tool
def calculate(expression: str) -> str:
    """Calculates the value of an arithmetic expression.

    Args:
        expression: Numbers, +, -, *, / and parentheses, for example "(48 + 24) / 3".
    """
    value = evaluate(ast.parse(expression.replace(",", "").strip(), mode="eval").body)
    return str(int(value)) if value == int(value) else str(round(value, 10))


def evaluate(node: ast.expr) -> float:
    """The value of a parsed expression. Raises ValueError for anything but arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](evaluate(left), evaluate(right))
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](evaluate(operand))
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")
