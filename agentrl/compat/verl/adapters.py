"""verl's tools and interactions as agentrl's: what the registry holds of one object of theirs."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import uuid4

from agentrl.errors import UserCodeError, UserError
from agentrl.interactions import Interaction, Reply, interaction
from agentrl.registry import tools
from agentrl.signatures import KEYWORD
from agentrl.tools import Tool, ToolFunction
from agentrl.tools import tool as decorate
from agentrl.tools.schema import adopt
from agentrl.trajectory import Message, Sample, ToolResult

C = TypeVar("C")
SCOPES = ("trajectory", "episode", "call")


def register_tool(theirs: Any, where: str) -> str:
    """Register one object of verl's `BaseTool`, or of what looks like one; its name.

    `config.scope: call` makes and releases an instance for every call, as verl does; by default an
    instance lives for the episode.

    Raises:
        UserError: no tool of verl's, or one without a schema; or a scope that there is not.
        RegistryError: another tool has the name.
    """
    _require_methods(theirs, "tool", ("create", "execute", "release"), where)
    config = theirs.config if isinstance(getattr(theirs, "config", None), Mapping) else {}
    scope = config.get("scope", "trajectory")
    if scope not in SCOPES:
        raise UserError(f"{where}: scope={scope!r}: choose one of {', '.join(SCOPES)}")
    schema = _plain_schema(theirs.get_openai_tool_schema(), where)
    name = schema["function"]["name"]
    parameters = adopt(schema["function"]["parameters"], name, where)
    timeout = float(config.get("timeout", 0) or 0) or 30.0
    # What the model may be called to fill in is the model's.
    free = "messages" not in parameters.schema.get("properties", {})
    function = ToolFunction(
        name=name,
        attribute="execute",
        schema=schema,
        parameters=parameters,
        is_async=True,
        injected=("messages",) if free else (),
    )
    record = Tool(
        name,
        _class_of(theirs, name, not free),
        (function,),
        timeout=timeout,
        scope="call" if scope == "call" else "episode",
        hooks=("reward", "close"),
        made_with=("sample",),
    )
    tools.add(name, record)
    return name


def _require_methods(theirs: Any, kind: str, methods: Sequence[str], where: str) -> None:
    for method in methods:
        if not inspect.iscoroutinefunction(getattr(theirs, method, None)):
            raise UserError(
                f"{where}: {type(theirs).__qualname__} is no {kind} of verl's: it needs"
                f" `async def {method}`"
            )


def register_function(function: Callable[..., Any], name: str, schema: Any) -> None:
    """Register what verl's `@function_tool` decorates."""
    where = f"@function_tool at {getattr(function, '__qualname__', function)!r}"

    @functools.wraps(function)
    async def waiting(*args: Any, **kwargs: Any) -> ToolResult:
        return as_result(await function(*args, **kwargs), where)

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> ToolResult:
        return as_result(function(*args, **kwargs), where)

    call = waiting if inspect.iscoroutinefunction(function) else plain
    written = None if schema is None else _plain_schema(schema, where)
    if written and name:
        written["function"]["name"] = name
    decorate(name="" if written else name, schema=written)(call)


def as_result(returned: Any, where: str) -> ToolResult:
    """What verl's tools return: a response, or a tuple of it, a reward and metrics.

    A reward of 0, which verl's tools return where they mean none, is none. Metrics are verl's own
    affair there, too; they are dropped.

    Raises:
        TypeError: a tuple of another length.
        UserError: images or videos.
    """
    reward = None
    if isinstance(returned, tuple):
        if not 1 <= len(returned) <= 3:
            raise TypeError(
                f"{where} returned a tuple of {len(returned)}: (response[, reward[, metrics]])"
            )
        returned, earned, *_ = *returned, None
        reward = None if earned is None else float(earned)
    if getattr(returned, "image", None) or getattr(returned, "video", None):
        raise UserError(f"{where} answered with images or videos; agentrl trains on text")
    if isinstance(returned, str):
        text = returned
    elif hasattr(returned, "text"):
        text = returned.text
        # One of verl's own tools wraps its response twice.
        text = text.text if hasattr(text, "text") else text
    else:
        text = json.dumps(returned, ensure_ascii=False, default=str)
    return ToolResult(text or "", reward=reward or None)


def _plain_schema(schema: Any, where: str) -> dict[str, Any]:
    """A schema of verl's as OpenAI writes it, without what is not said."""
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_none=True)
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{where}: no tool schema: expected {{type: function, function: {{name, description,"
            f" parameters}}}}, got {schema!r:.200}"
        )
    function = {k: v for k, v in function.items() if k != "strict"}
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}


def _class_of(theirs: Any, name: str, messages_are_the_models: bool) -> type:
    """A class whose objects are one episode's share of verl's tool.

    Args:
        theirs: verl's tool.
        name: what it is called.
        messages_are_the_models: it has a parameter of that name, so that the conversation is not
            told.
    """
    where = f"the tool {name!r}"

    class Share:
        sample: Sample
        instance_id: str

        # `create` is async: calling the class gives what is awaited for the object.
        def __new__(cls, sample: Sample, **create_kwargs: Any) -> Any:
            return cls._begin(sample, create_kwargs)

        @classmethod
        async def _begin(cls, sample: Sample, create_kwargs: dict[str, Any]) -> Any:
            share = object.__new__(cls)
            given = str(uuid4())
            begun = await theirs.create(given, **_both_ways(theirs.create, create_kwargs))
            # A pair, or, in older tools, the id alone.
            share.instance_id = (begun[0] if isinstance(begun, tuple) else begun) or given
            share.sample = sample
            return share

        async def execute(self, /, **parameters: Any) -> ToolResult:
            messages = () if messages_are_the_models else parameters.pop("messages", ())
            told = self._agent_data(messages)
            returned = await theirs.execute(self.instance_id, parameters, agent_data=told)
            return as_result(returned, where)

        async def reward(self) -> float:
            if not hasattr(theirs, "calc_reward"):
                return 0.0
            earned = await theirs.calc_reward(self.instance_id)
            # Some of verl's own return what they found, or nothing.
            return float(earned) if isinstance(earned, int | float) else 0.0

        async def close(self) -> None:
            await theirs.release(self.instance_id)

        def _agent_data(self, messages: tuple[Message, ...]) -> SimpleNamespace:
            return SimpleNamespace(
                messages=[m.as_dict() for m in messages],
                request_id=self.instance_id,
                tools_kwargs={k: dict(v) for k, v in self.sample.tools_kwargs.items()},
                extra_fields=dict(self.sample.extra),
            )

    Share.__signature__ = _signature(theirs.create)  # type: ignore[attr-defined]
    return _called_like(theirs, Share)


def _signature(create: Callable[..., Any]) -> inspect.Signature:
    """Return what the class takes: `sample`, and of the row what `create` takes, see `_both_ways`.

    So a row that lacks an argument is refused before a model is loaded.
    """
    every = inspect.signature(create).parameters.values()
    taken = [p for p in every if p.kind in KEYWORD and p.name != "instance_id"]
    named = [p.replace(kind=p.KEYWORD_ONLY) for p in taken if p.name != "create_kwargs"]
    sample = inspect.Parameter("sample", inspect.Parameter.KEYWORD_ONLY)
    is_open = len(named) < len(taken) or any(p.kind is p.VAR_KEYWORD for p in every)
    rest = [inspect.Parameter("create_kwargs", inspect.Parameter.VAR_KEYWORD)] if is_open else []
    return inspect.Signature([sample, *(p for p in named if p.name != "sample"), *rest])


def _both_ways(create: Callable[..., Coroutine[Any, Any, Any]], kwargs: dict[str, Any]) -> dict:
    """The row's create_kwargs as `create` takes them: by name, or as verl of late has it, whole."""
    parameters = inspect.signature(create).parameters.values()
    both = {"create_kwargs": kwargs, **kwargs}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return both
    named = {p.name for p in parameters if p.kind in KEYWORD} - {"instance_id"}
    return {k: v for k, v in both.items() if k in named}


# -- interactions ---------------------------------------------------------------------------------


def register_interaction(theirs: Any, name: str, where: str) -> None:
    """Register one object of verl's `BaseInteraction`, or of what looks like one.

    Raises:
        UserError: it has not verl's methods.
        RegistryError: another interaction has the name.
    """
    _require_methods(theirs, "interaction", ("start_interaction", "generate_response"), where)

    class Share(Interaction):
        """One episode's share of verl's interaction."""

        def __init__(self, **kwargs: Any):
            self._kwargs = {"name": name, **kwargs}
            self._id = ""

        async def respond(self, messages: Sequence[Message]) -> Reply:
            if not self._id:
                given = str(uuid4())
                self._id = await theirs.start_interaction(given, **self._kwargs) or given
            answer = await theirs.generate_response(
                self._id, [m.as_dict() for m in messages], **self._kwargs
            )
            if not isinstance(answer, tuple) or len(answer) != 4:
                raise UserCodeError(
                    f"the interaction {name!r}: generate_response returned {answer!r:.100}, not"
                    " (should_terminate_sequence, response_content, current_turn_score, more)"
                )
            done, content, score, _ = answer
            return Reply(content, score=float(score or 0.0), done=bool(done))

        async def close(self) -> None:
            finalize = getattr(theirs, "finalize_interaction", None)
            if self._id and finalize:
                # Older ones are not told which episode is meant.
                takes = inspect.signature(finalize).parameters
                await finalize(*([self._id] if takes else []))

    interaction(name)(_called_like(theirs, Share))


def name_of(class_name: str) -> str:
    """The name that verl gives an interaction whose YAML file gives it none.

    Example: `Gsm8kInteraction` is "gsm8k".
    """
    return class_name.rpartition(".")[2].removesuffix("Interaction").lower()


def _called_like(theirs: Any, share: type[C]) -> type[C]:
    """Give the class the name and the module of verl's own, for messages."""
    share.__name__ = share.__qualname__ = type(theirs).__name__
    share.__module__ = type(theirs).__module__
    return share
