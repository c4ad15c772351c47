"""Adapt verl's tools and interactions to agentrl's, and register them."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, SupportsFloat, TypeVar
from uuid import uuid4

from agentrl.errors import UserCodeError, UserError
from agentrl.images import Image
from agentrl.interactions import Interaction, Reply, interaction
from agentrl.registry import tools
from agentrl.signatures import KEYWORD
from agentrl.tools import Tool, ToolFunction
from agentrl.tools import tool as decorate
from agentrl.tools.schema import parameters_from_schema
from agentrl.trajectory import Message, Sample, ToolResult, as_number

C = TypeVar("C")
SCOPES = ("trajectory", "episode", "call")


def register_tool(verl_tool: Any, where: str) -> str:
    """Register an object of verl's `BaseTool`, or one with the same methods; return its name.

    With `config.scope: call`, an instance is created and released for every call, as in verl. By
    default an instance exists for the whole episode.

    Raises:
        UserError: the object lacks a method or a schema, or its scope is unknown.
        RegistryError: another tool has the name.
    """
    _require_methods(verl_tool, "a tool", ("create", "execute", "release"), where)
    config = verl_tool.config if isinstance(getattr(verl_tool, "config", None), Mapping) else {}
    scope = config.get("scope", "trajectory")
    if scope not in SCOPES:
        raise UserError(f"{where}: scope={scope!r} must be one of {', '.join(SCOPES)}")
    schema = _plain_schema(verl_tool.get_openai_tool_schema(), where)
    name = schema["function"]["name"]
    parameters = parameters_from_schema(schema["function"]["parameters"], name, where)
    timeout = float(config.get("timeout", 0) or 0) or 30.0
    # If the schema has a parameter `messages`, the model sets it. Otherwise the tool gets the
    # conversation.
    takes_messages = "messages" not in parameters.schema.get("properties", {})
    function = ToolFunction(
        name=name,
        attribute="execute",
        schema=schema,
        parameters=parameters,
        is_async=True,
        injected=(*(("messages",) if takes_messages else ()), *_sandbox_of(verl_tool)),
    )
    record = Tool(
        name,
        _make_class(verl_tool, name, takes_messages),
        (function,),
        timeout=timeout,
        scope="call" if scope == "call" else "episode",
        hooks=("reward", "close"),
        constructor_injected=("sample",),
    )
    tools.add(name, record)
    return name


def _sandbox_of(verl_tool: Any) -> tuple[str, ...]:
    """Return ("sandbox",) for a verl tool that runs programs in the sandbox, else ().

    The tool uses `agentrl.sandbox.current()`, not an argument. But because the name is listed as an
    injected parameter, the run tests the sandbox before it starts.
    """
    return ("sandbox",) if getattr(verl_tool, "runs_programs", False) else ()


def _require_methods(adapted: Any, kind: str, methods: Sequence[str], where: str) -> None:
    for method in methods:
        if not inspect.iscoroutinefunction(getattr(adapted, method, None)):
            raise UserError(
                f"{where}: {type(adapted).__qualname__} is not {kind} of verl's: it must define"
                f" `async def {method}`"
            )


def register_function(function: Callable[..., Any], name: str, schema: Any) -> None:
    """Register a function that verl's `@function_tool` decorates."""
    where = f"@function_tool at {getattr(function, '__qualname__', function)!r}"

    @functools.wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> ToolResult:
        return convert_result(await function(*args, **kwargs), where)

    @functools.wraps(function)
    def call_plain(*args: Any, **kwargs: Any) -> ToolResult:
        return convert_result(function(*args, **kwargs), where)

    call = call_async if inspect.iscoroutinefunction(function) else call_plain
    converted = None if schema is None else _plain_schema(schema, where)
    if converted and name:
        converted["function"]["name"] = name
    decorate(name="" if converted else name, schema=converted)(call)


def convert_result(returned: Any, where: str) -> ToolResult:
    """Convert the result of a verl tool: a response, or (response[, reward[, metrics]]).

    A reward of 0 becomes None, because verl's tools return 0 if they have no reward. Metrics are
    dropped.

    Raises:
        TypeError: the tuple has another length.
        UserError: the response has videos.
    """
    reward = None
    if isinstance(returned, tuple):
        if not 1 <= len(returned) <= 3:
            raise TypeError(
                f"{where} returned a tuple of {len(returned)}, not (response[, reward[, metrics]])"
            )
        returned, value, *_ = *returned, None
        reward = None if value is None else as_number(value)
    if getattr(returned, "video", None):
        raise UserError(f"{where} returned videos; agentrl trains on texts and images only")
    images = [i for i in getattr(returned, "image", None) or () if i is not None]
    if isinstance(returned, str):
        text = returned
    elif hasattr(returned, "text"):
        text = returned.text
        # One of verl's own tools wraps its response twice.
        text = text.text if hasattr(text, "text") else text
    else:
        text = json.dumps(returned, ensure_ascii=False, default=str)
    # As in verl, the images come first.
    content: Any = [*map(Image.of, images), text or ""] if images else text or ""
    return ToolResult(content, reward=reward or None)


def _plain_schema(schema: Any, where: str) -> dict[str, Any]:
    """Convert a verl schema to OpenAI's form, without the unset fields."""
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_none=True)
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{where}: the tool schema must be {{type: function, function: {{name, description,"
            f" parameters}}}}, not {schema!r:.200}"
        )
    function = {k: v for k, v in function.items() if k != "strict"}
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}


def _make_class(verl_tool: Any, name: str, takes_messages: bool) -> type:
    """Make a class whose objects are instances of a verl tool, one per episode.

    Args:
        verl_tool: the verl tool.
        name: the name of the tool.
        takes_messages: whether the conversation is passed to the tool.
    """
    where = f"the tool {name!r}"

    class Instance:
        sample: Sample
        instance_id: str

        # `create` is async, so calling the class returns a coroutine that returns the object.
        def __new__(cls, sample: Sample, **create_kwargs: Any) -> Any:
            return cls._create(sample, create_kwargs)

        @classmethod
        async def _create(cls, sample: Sample, create_kwargs: dict[str, Any]) -> Any:
            instance = object.__new__(cls)
            default_id = str(uuid4())
            created = await verl_tool.create(
                default_id, **_create_arguments(verl_tool.create, create_kwargs)
            )
            # Older tools return the id, newer tools a pair of the id and a response.
            new_id = created[0] if isinstance(created, tuple) else created
            instance.instance_id = new_id or default_id
            instance.sample = sample
            return instance

        async def execute(self, /, **parameters: Any) -> ToolResult:
            messages = parameters.pop("messages", ()) if takes_messages else ()
            for name in _sandbox_of(verl_tool):
                del parameters[name]
            agent_data = self._agent_data(messages)
            returned = await verl_tool.execute(self.instance_id, parameters, agent_data=agent_data)
            return convert_result(returned, where)

        async def reward(self) -> float:
            if not hasattr(verl_tool, "calc_reward"):
                return 0.0
            value = await verl_tool.calc_reward(self.instance_id)
            # Some verl tools return a value that is not a number, or None.
            return as_number(value) if isinstance(value, SupportsFloat) else 0.0

        async def close(self) -> None:
            await verl_tool.release(self.instance_id)

        def _agent_data(self, messages: tuple[Message, ...]) -> SimpleNamespace:
            return SimpleNamespace(
                messages=[m.as_dict() for m in messages],
                request_id=self.instance_id,
                tools_kwargs={k: dict(v) for k, v in self.sample.tools_kwargs.items()},
                extra_fields=dict(self.sample.extra),
            )

    Instance.__signature__ = _signature(verl_tool.create)  # type: ignore[attr-defined]
    return _named_like(verl_tool, Instance)


def _signature(create: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of the class: `sample`, and the row's arguments that `create` takes.

    Because of this signature, a row that lacks an argument is refused before a model is loaded.
    """
    declared = inspect.signature(create).parameters.values()
    accepted = [p for p in declared if p.kind in KEYWORD and p.name != "instance_id"]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in accepted if p.name != "create_kwargs"]
    sample = inspect.Parameter("sample", inspect.Parameter.KEYWORD_ONLY)
    is_open = len(parameters) < len(accepted) or any(p.kind is p.VAR_KEYWORD for p in declared)
    taken = [sample, *(p for p in parameters if p.name != "sample")]
    if is_open:
        taken.append(inspect.Parameter("create_kwargs", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(taken)


def _create_arguments(
    create: Callable[..., Coroutine[Any, Any, Any]], kwargs: dict[str, Any]
) -> dict:
    """Return the arguments of `create`: the row's create_kwargs, by name and as one mapping.

    Newer versions of verl pass the mapping as `create_kwargs`.
    """
    parameters = inspect.signature(create).parameters.values()
    arguments = {"create_kwargs": kwargs, **kwargs}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    names = {p.name for p in parameters if p.kind in KEYWORD} - {"instance_id"}
    return {k: v for k, v in arguments.items() if k in names}


# -- interactions ---------------------------------------------------------------------------------


def register_interaction(verl_interaction: Any, name: str, where: str) -> None:
    """Register an object of verl's `BaseInteraction`, or one with the same methods.

    Raises:
        UserError: the object lacks a method.
        RegistryError: another interaction has the name.
    """
    _require_methods(
        verl_interaction, "an interaction", ("start_interaction", "generate_response"), where
    )

    class Instance(Interaction):
        """An instance of a verl interaction, for one episode."""

        def __init__(self, **kwargs: Any):
            self._kwargs = {"name": name, **kwargs}
            self._id = ""

        async def respond(self, messages: Sequence[Message]) -> Reply:
            if not self._id:
                default_id = str(uuid4())
                new_id = await verl_interaction.start_interaction(default_id, **self._kwargs)
                self._id = new_id or default_id
            answer = await verl_interaction.generate_response(
                self._id, [m.as_dict() for m in messages], **self._kwargs
            )
            if not isinstance(answer, tuple) or len(answer) != 4:
                raise UserCodeError(
                    f"the interaction {name!r}: generate_response returned {answer!r:.100}, not"
                    " (should_terminate_sequence, response_content, current_turn_score, more)"
                )
            is_done, content, score, _ = answer
            return Reply(content, score=0.0 if score is None else score, done=bool(is_done))

        async def close(self) -> None:
            finalize = getattr(verl_interaction, "finalize_interaction", None)
            if self._id and finalize:
                # Older interactions have no parameter for the id.
                parameters = inspect.signature(finalize).parameters
                await finalize(*([self._id] if parameters else []))

    interaction(name)(_named_like(verl_interaction, Instance))


def interaction_name(class_name: str) -> str:
    """Return verl's name of an interaction that has no name in the YAML file.

    Example: `Gsm8kInteraction` is "gsm8k".
    """
    return class_name.rpartition(".")[2].removesuffix("Interaction").lower()


def _named_like(original: Any, adapter: type[C]) -> type[C]:
    """Give an adapter class the name and the module of the verl class, for messages."""
    adapter.__name__ = adapter.__qualname__ = type(original).__name__
    adapter.__module__ = type(original).__module__
    return adapter
