"""`agentrl tools`: serve, list, show and call tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from agentrl.plural import plural
from agentrl.terminal import echo

if TYPE_CHECKING:
    from agentrl.config import SandboxConfig
    from agentrl.tools import Tool

app = typer.Typer(
    help="Serve tools to training runs; list, show and call them as a model would.",
    no_args_is_help=True,
)

FilesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE]...", help="The same as --file.")
]
FilesOption = Annotated[
    list[str] | None, typer.Option("--file", "-f", help="Python files with @tool, or shelf:NAME.")
]
Name = Annotated[str, typer.Argument(help="A tool, or one of the functions it offers.")]


@app.command()
def serve(
    files: FilesArgument = None,
    file: FilesOption = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8900,
    token_env: str = "AGENTRL_TOOLS_TOKEN",
    workers: Annotated[int, typer.Option(min=1)] = 1,
    max_calls: Annotated[int, typer.Option(min=1)] = 1024,
    sandbox: str = "bubblewrap",
    mcp: Annotated[bool, typer.Option("--mcp")] = False,
) -> None:
    """Serve tools over HTTP until Ctrl-C or SIGTERM; running calls may finish.

    Addresses other than loopback need a token. A worker that dies is restarted. All calls of an
    episode go to the same worker.

    Args:
        host: Address to bind.
        port: 0 chooses a free port.
        token_env: Environment variable that contains the bearer token.
        workers: Processes; they use this port and the next ones.
        max_calls: Calls that a process runs at the same time; clients retry others.
        sandbox: Where tools run programs (sandbox.backend).
        mcp: Also serve the Model Context Protocol at /mcp (one worker).

    Examples:
        agentrl tools serve shelf:calculator my_tools.py

        AGENTRL_TOOLS_TOKEN=... agentrl tools serve -f my_tools.py --host 0.0.0.0

        agentrl tools serve my_tools.py --workers 4

        agentrl tools serve shelf:calculator --mcp
    """
    import os

    from agentrl.config import load_config
    from agentrl.errors import Terminated, UserError

    token, paths = os.environ.get(token_env, ""), [*(files or []), *(file or [])]
    missing_token = "" if token else token_env
    programs = load_config(flags={"sandbox.backend": sandbox}).sandbox
    if workers > 1:
        if mcp:
            raise UserError("--mcp needs a single process: remove --workers")
        settings = {"host": host, "port": port, "token": token, "max_calls": max_calls}
        _serve_workers(paths, missing_token, workers, programs, settings)
    from agentrl.registry import tools
    from agentrl.sandbox import configure
    from agentrl.tools.serving.listen import ToolServer

    configure(programs)
    _load(paths)
    server = ToolServer(
        host,
        port,
        token,
        lambda: _print_address(server.url, tools.names(), missing_token),
        max_calls=max_calls,
        mcp=mcp,
    )
    server.serve_forever()  # It returns after SIGTERM; Ctrl-C raises KeyboardInterrupt.
    raise Terminated


def _serve_workers(
    paths: list[str],
    missing_token: str,
    workers: int,
    programs: SandboxConfig,
    settings: dict[str, Any],
) -> NoReturn:
    """Serve tools with several processes, until the process that watches them ends."""
    import sys

    from agentrl.http import fetch_json
    from agentrl.tools.serving.background import serve_in_background

    served = serve_in_background(  # the workers load the files, not this process
        paths, workers=workers, sandbox=programs.model_dump(), **settings
    )
    with served.handle as handle:
        _, answer = fetch_json(served.url, "/tools", token=settings["token"], timeout=15.0)
        names = [t["name"] for t in answer["tools"]]
        _check_not_empty(names, paths)
        _print_address(served.url, names, missing_token)
        try:
            handle.wait()
        finally:
            handle.drain()
    sys.exit(1)


@app.command("list")
def list_(files: FilesArgument = None, file: FilesOption = None) -> None:
    """List the tools of files, with the functions that a model may call.

    Examples:
        agentrl tools list shelf:calculator -f my_tools.py
    """
    from agentrl.registry import tools

    _load([*(files or []), *(file or [])])
    for name in tools.names():
        tool: Tool = tools.get(name)
        kind = f"one object per {tool.scope}" if tool.is_class else "function"
        kind = f"environment, {kind}" if tool.is_environment else kind
        calls = plural(tool.max_concurrency, "call")
        limit = f", at most {calls} at once" if tool.max_concurrency else ""
        rate = f", rate limit {tool.rate_limit:g} per second" if tool.rate_limit else ""
        injected = f", gets {', '.join(sorted(tool.injected))}" if tool.injected else ""
        echo(f"{name}  ({kind}, {tool.timeout:g} s{limit}{rate}{injected})")
        for function in tool.functions:
            about = function.schema["function"].get("description", "").partition("\n")[0]
            echo(f"  {function.parameters.usage}  {about}")


@app.command()
def show(name: Name, file: FilesOption = None) -> None:
    """Print the JSON schema that the model reads.

    Examples:
        agentrl tools show calculator --file shelf:calculator
    """
    import json

    _load(file or [])
    tool = _find_tool(name)
    schemas = [f.schema for f in tool.functions if name in (tool.name, f.name)]
    echo(json.dumps(schemas[0] if len(schemas) == 1 else schemas, indent=2, ensure_ascii=False))


@app.command()
def call(
    name: Name,
    arguments: Annotated[str, typer.Argument()] = "{}",
    file: FilesOption = None,
    create_kwargs: str = "{}",
) -> None:
    """Call a tool as a model would, and print the result; exit code 1 if the call failed.

    Args:
        arguments: A JSON object.
        create_kwargs: A JSON object: the constructor arguments of a class tool.

    Examples:
        agentrl tools call calculator '{"expression": "3*4"}' --file shelf:calculator

        agentrl tools call write '{"line": "x"}' -f notes.py --create-kwargs '{"capacity": 3}'
    """
    import asyncio
    import sys

    from agentrl.errors import UserError
    from agentrl.signatures import find_argument_problems
    from agentrl.tools import LocalToolbox
    from agentrl.trajectory import Sample, ToolCall, ToolResult, show_images

    _load(file or [])
    tool = _find_tool(name)
    names = [f.name for f in tool.functions]
    if name not in names and len(names) > 1:
        raise UserError(f"the tool {name!r} offers several functions: call {' or '.join(names)}")
    function = name if name in names else names[0]
    kwargs = _parse_object("--create-kwargs", create_kwargs)
    if kwargs and not tool.is_class:
        raise UserError(f"--create-kwargs: the tool {tool.name!r} is a function, not a class")
    if tool.is_class:
        problems = find_argument_problems(tool.target, kwargs, injected=tool.constructor_injected)
        if problems:
            raise UserError(
                f"--create-kwargs: the constructor of the tool {tool.name!r}: {'; '.join(problems)}"
            )
    sample = Sample(
        "cli", (), tools=(tool.name,), tools_kwargs={tool.name: {"create_kwargs": kwargs}}
    )
    tool_call = ToolCall(function, _parse_object("ARGUMENTS", arguments))

    async def run() -> ToolResult:
        toolbox = LocalToolbox()
        try:
            await toolbox.open("cli", sample)
            [result] = await toolbox.run([tool_call], "cli", 0)
            return result
        finally:
            await toolbox.aclose()

    result = asyncio.run(run())
    echo(show_images(result.content, result.images))
    if not result.ok:
        sys.exit(1)


def _print_address(url: str, names: list[str], missing_token: str) -> None:
    """Print the address of the tools.

    Args:
        url: the address of the server.
        names: the names of its tools.
        missing_token: the environment variable that should contain a token; "" if there is one.
    """
    if missing_token:
        echo(
            f"warning: {url} needs no token: every user and program of this machine can run these"
            f" tools. Set the environment variable {missing_token} to a token",
            err=True,
        )
    echo(f"{plural(len(names), 'tool')} at {url}: {', '.join(names)}")
    echo(f"use them with: agentrl train ... tools.transport={url}")


def _load(files: list[str]) -> None:
    from agentrl.registry import load_file, tools

    for file in files:
        load_file(file)
    _check_not_empty(tools.names(), files)


def _check_not_empty(names: list[str], files: list[str]) -> None:
    """Raise `UserError` if there are no tools."""
    from agentrl.errors import UserError
    from agentrl.registry import explain_verl_classes

    if not names:
        listed = ", ".join(files) or "no files"
        raise UserError(
            f"no @tool in {listed}. Give files with tools: --file my_tools.py or shelf:calculator"
            f"{explain_verl_classes('BaseTool')}"
        )


def _find_tool(name: str) -> Tool:
    """Return the tool of that name, or the tool with a function of that name."""
    from agentrl.errors import RegistryError
    from agentrl.registry import did_you_mean, tools

    if name in tools:
        return tools.get(name)
    by_function = {f.name: tools.get(t) for t in tools.names() for f in tools.get(t).functions}
    if name not in by_function:
        names = sorted({*by_function, *tools.names()})
        raise RegistryError(
            f"unknown tool {name!r}.{did_you_mean(name, names)} Tools: {', '.join(names)}"
        )
    return by_function[name]


def _parse_object(argument: str, text: str) -> dict:
    """Parse a JSON object from the command line; `argument` is its name, for messages."""
    import json

    from agentrl.errors import UserError

    try:
        value = json.loads(text)
    except ValueError as e:
        raise UserError(f"{argument}: not JSON: {text} ({e})") from None
    if not isinstance(value, dict):
        raise UserError(f'{argument}: not a JSON object, e.g. {{"expression": "3*4"}}: {text}')
    return value
