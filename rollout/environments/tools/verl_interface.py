"""What tools written for verl import from it, for where verl is not installed.

The modules have the names that such tools use: `BaseTool`, `ToolResponse`, `OpenAIFunctionToolSchema`, `function_tool`
and `rollout_trace_op`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

FUNCTION_TOOL_REGISTRY: dict[str, SimpleNamespace] = {}
"""By name: the function `fn`, and its `tool_schema`, None if it follows from the function."""


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a tool, as JSON schema."""

    model_config = ConfigDict(extra="allow")

    type: str
    properties: dict[str, dict[str, object]]
    required: list[str] = []


class OpenAIFunctionSchema(BaseModel):
    """The function of a tool."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool in OpenAI's form."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool answers."""

    text: str | None = None
    image: list[object] | None = None
    video: list[object] | None = None


class BaseTool:
    """The base class of verl's tools."""

    def __init__(self, config: Mapping[str, object], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: object) -> tuple[str, ToolResponse]:
        return instance_id or uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, object], **kwargs: object
    ) -> tuple[ToolResponse, float, dict[str, object]]:
        raise NotImplementedError(f"{type(self).__name__} has no execute")

    async def calc_reward(self, instance_id: str, **kwargs: object) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: object) -> None:
        return


def function_tool(name: str | Callable[..., object] | None = None, *, schema: object = None) -> object:
    """Declares a function as a tool: `@function_tool`, `@function_tool("name")`, `@function_tool(schema={…})`."""

    def register(function: Callable[..., object]) -> Callable[..., object]:
        tool_name = name if isinstance(name, str) else function.__name__
        FUNCTION_TOOL_REGISTRY[tool_name] = SimpleNamespace(fn=function, tool_schema=schema)
        return function

    return register(name) if callable(name) else register


def rollout_trace_op(function: Callable[..., object]) -> Callable[..., object]:
    return function


_MODULES: Mapping[str, Mapping[str, object]] = {
    "verl": {},
    "verl.tools": {},
    "verl.tools.base_tool": {"BaseTool": BaseTool},
    "verl.tools.function_tool": {
        "FUNCTION_TOOL_REGISTRY": FUNCTION_TOOL_REGISTRY,
        "function_tool": function_tool,
    },
    "verl.tools.schemas": {
        "OpenAIFunctionParametersSchema": OpenAIFunctionParametersSchema,
        "OpenAIFunctionSchema": OpenAIFunctionSchema,
        "OpenAIFunctionToolSchema": OpenAIFunctionToolSchema,
        "ToolResponse": ToolResponse,
    },
    "verl.utils": {},
    "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
}


def offer_verl_interface() -> None:
    """Makes these modules importable in this process, unless verl is."""
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        return
    for name, content in _MODULES.items():
        module = ModuleType(name)
        module.__dict__.update(content, __path__=[], __spec__=ModuleSpec(name, None, is_package=True))
        sys.modules[name] = module
