"""Tools as verl's users write them: a class with its YAML file, and functions."""

from __future__ import annotations

VERL_TOOL = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

EVENTS = []

class Counter(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.counts = {}

    async def create(self, instance_id=None, **kwargs):
        instance_id, response = await super().create(instance_id)
        self.counts[instance_id] = kwargs["create_kwargs"].get("start", 0)
        EVENTS.append("create")
        return instance_id, response

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += parameters["by"] * self.config["factor"]
        return ToolResponse(text=f"now {self.counts[instance_id]}"), 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.counts[instance_id])

    async def release(self, instance_id, **kwargs):
        del self.counts[instance_id]
        EVENTS.append("release")
"""
VERL_YAML = """
tools:
  - class_name: verl_counter.Counter
    config: {type: native, factor: 2}
    tool_schema:
      type: function
      function:
        name: count
        description: Counts.
        parameters: {type: object, properties: {by: {type: integer, description: Step.}}, required: [by]}
"""
FUNCTION_TOOLS = """
from verl.tools.function_tool import function_tool

@function_tool
def double(a: int):
    '''Doubles a number.

    Args:
        a: The number.
    '''
    return str(2 * a), 0.25

@function_tool("half", schema={"type": "function", "function": {"name": "half", "description": "Halves.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}}})
def halve(a):
    return a / 2
"""
