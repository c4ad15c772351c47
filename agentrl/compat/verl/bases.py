"""The classes and functions that user files import from verl, besides its own tools."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from agentrl.errors import UserError


class OpenAIFunctionPropertySchema(BaseModel):
    """The schema of a parameter."""

    model_config = ConfigDict(extra="allow")
    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The schema of all parameters."""

    model_config = ConfigDict(extra="allow")
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """The schema of a function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=OpenAIFunctionParametersSchema
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """The schema of a tool, as the model sees it."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """A tool's response: a text and images (PIL, or bytes of a file). Videos are refused."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Return whether the response is empty."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Return whether the response has text and nothing else."""
        return bool(self.text) and not self.image and not self.video


class BaseTool:
    """verl's base class of tools: one object per process, with an instance id per episode.

    In an episode, agentrl calls `create` once, `execute` for each call, `calc_reward` once at the
    end, and always `release`, also after an error.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the tool's schema, for tools without one in the YAML file."""
        if schema := getattr(self, "tool_schema", None):
            return schema
        raise UserError(
            f"{type(self).__qualname__} has no schema: set tool_schema in the YAML file, or define"
            " get_openai_tool_schema"
        )

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Any]:
        """Begin an episode: return its instance id and a response."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a call: return the response, its reward and metrics."""
        raise NotImplementedError(f"{type(self).__qualname__} must define execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of the episode's final state."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free the resources of the episode."""


class BaseInteraction:
    """verl's base class of interactions: one object per process, an instance id per episode."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode: return its instance id."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Reply to the assistant: return (is done, the reply, the turn's score, more)."""
        raise NotImplementedError(f"{type(self).__qualname__} must define generate_response")

    async def calculate_score(self, instance_id: str = "", **kwargs: Any) -> float:
        """Return a score. verl and agentrl never call this method; subclasses may."""
        return 0.0

    async def finalize_interaction(self, instance_id: str = "", **kwargs: Any) -> None:
        """Free the resources of the episode."""


def function_tool(
    name: str | Callable[..., Any] | None = None,
    *,
    schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None,
) -> Any:
    """Register a function as a tool; this is verl's decorator `@function_tool`.

    It may have arguments: `@function_tool("name")`, `@function_tool(schema=...)`. As with `@tool`,
    the schema comes from the signature and the docstring, which are both optional.

    Raises:
        UserError, RegistryError: as `agentrl.tool`.
    """
    from agentrl.compat.verl.adapters import register_function

    def register(function: Callable[..., Any], as_name: str = "") -> Callable[..., Any]:
        register_function(function, as_name, schema)
        return function

    if callable(name):
        return register(name)
    return lambda function: register(function, name or "")


F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(function: F) -> F:
    """Return the function unchanged; in verl, this decorator traces calls."""
    return function


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = True, **kwargs: Any) -> None:
    """Create a folder; this is verl's `hdfs_io.makedirs`."""
    os.makedirs(_local(name), mode=mode, exist_ok=exist_ok)


def exists(path: str, **kwargs: Any) -> bool:
    """Return whether a path exists; this is verl's `hdfs_io.exists`."""
    return os.path.exists(_local(path))


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """Copy a file or a folder, into an existing folder too; this is verl's `hdfs_io.copy`."""
    if os.path.isdir(_local(src)):
        shutil.copytree(src, _local(dst), dirs_exist_ok=True)
    else:
        shutil.copy(src, _local(dst))
    return True


def _local(path: str) -> str:
    """Return the path, if it is on this machine.

    Raises:
        UserError: the path is on HDFS.
    """
    if path.startswith("hdfs:"):
        raise UserError(f"{path}: agentrl does not read or write HDFS. Use a path of this machine")
    return path
