"""verl's names for a tool's schema and its answer (`verl.tools.schemas`)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class OpenAIFunctionPropertySchema(BaseModel):
    """A parameter."""

    model_config = ConfigDict(extra="allow")
    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """All parameters."""

    model_config = ConfigDict(extra="allow")
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """A function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=OpenAIFunctionParametersSchema
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """What the model is shown of a tool."""

    type: str = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool answers. agentrl trains on text: a response with images or videos is refused."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether it holds text and nothing else."""
        return bool(self.text) and not self.image and not self.video
