"""`agentrl check agent` names what is wrong with an agent."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from PIL import Image as PIL
from support.vision import write_vision_model
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.errors import ConfigError
from agentrl.images import Image, data_url

# An agent by the standard library alone. `%s` changes it. It runs as a program; or in a thread, by
# `FUNCTION`, which spares the start of two processes for each episode.
AGENT = """
import json, os, sys, time, urllib.error, urllib.request, uuid

environ = globals().get("environ", os.environ)
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string"}}}}}
URL, SYSTEM, MORE = environ["OPENAI_BASE_URL"], lambda: "You calculate.", lambda: {}
keep = lambda messages: messages
kept = lambda message: message
calls = 0

def ask(messages):
    headers = {"authorization": "Bearer " + environ["OPENAI_API_KEY"]}
    body = {"messages": messages, "tools": [TOOL], **MORE()}
    request = urllib.request.Request(URL + "/chat/completions", json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=30))["choices"][0]["message"]

%s

def main():
    global calls
    prompt = json.loads(environ["AGENTRL_SAMPLE"])["prompt"]
    messages = [{"role": "system", "content": SYSTEM()}, *prompt]
    while True:
        messages[0] = {"role": "system", "content": SYSTEM()}
        message = ask(keep(messages))
        calls += 1
        messages.append(kept(message))
        if not message.get("tool_calls"):
            return
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "12"})

main()
"""
FUNCTION = """
import contextlib, json, pathlib, runpy

def run(sample, base_url, api_key):
    environ = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    environ["AGENTRL_SAMPLE"] = json.dumps(sample)
    script = pathlib.Path(__file__).with_name("my_agent.py")
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(script), {"environ": environ})
"""
HANGS = "kept = lambda message: time.sleep(60)"
IGNORES = """
plain = ask
def ask(messages):
    for _ in range(3):
        try:
            return plain(messages)
        except urllib.error.HTTPError:
            time.sleep(0.05)
    sys.exit()
"""
EDITS = "kept = lambda message: message | {'content': (message['content'] or '').upper()}"
DROPS = "keep = lambda messages: messages if calls < 1 else [messages[0], *messages[2:]]"
LOSES_TEXT = "kept = lambda m: m | {'content': None} if m.get('tool_calls') else m"
SENDS_TWICE = """
plain = ask
def ask(messages):
    plain(messages)
    return plain(messages)
"""
REWRITES = """
def kept(message):
    for function in [call["function"] for call in message.get("tool_calls", ())]:
        function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=1)
    return message
"""
TWO = "MORE = lambda: {'n': 2}"
TOOLS = "MORE = lambda: {'tools': [TOOL] * (1 + (calls > 0))}"
SUB_AGENTS = """
import threading
def ask_as(name):
    messages = [{"role": "user", "content": name}]
    for _ in range(2):
        messages.append(ask(messages))
        for call in messages[-1].get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "12"})
workers = [threading.Thread(target=ask_as, args=(name,)) for name in ("Ann", "Bob")]
for worker in workers: worker.start()
for worker in workers: worker.join()
os._exit(0)
"""
FORMAT = "MORE = lambda: {'response_format': {'type': 'xml'}}"
TYPED = """
STEP = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SCHEMA = {"type": "object", "$defs": {"Step": STEP}, "properties": {
    "steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}}}, "required": ["steps"]}
MORE = lambda: {"response_format": {
    "type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
def kept(message):
    return message if message.get("tool_calls") else json.loads(message["content"])["steps"][0]["n"]
"""
# The agent with the Responses API.
RESPONSES = """
items, seen = [], 1
edit, more = lambda item: item, lambda: {}
def ask(messages):
    global seen
    for message in messages[seen:]:
        is_result = message["role"] == "tool"
        items.append({"type": "function_call_output", "call_id": message["tool_call_id"],
                      "output": message["content"]} if is_result else message)
    seen = len(messages) + 1
    headers = {"authorization": "Bearer " + environ["OPENAI_API_KEY"]}
    tools = [{"type": "function", **TOOL["function"]}]
    body = {"input": items, "instructions": SYSTEM(), "tools": tools, **more()}
    request = urllib.request.Request(URL + "/responses", json.dumps(body).encode(), headers)
    output = json.load(urllib.request.urlopen(request, timeout=30))["output"]
    items.extend(map(edit, output))
    calls = [item for item in output if item["type"] == "function_call"]
    return {"tool_calls": [{"id": call["call_id"]} for call in calls]}
"""


# The same in Anthropic's Messages API.
MESSAGES_AGENT = """
import json, urllib.request, uuid

TOOL = {"name": "calculator", "input_schema": {
    "type": "object", "properties": {"expression": {"type": "string"}}}}
MORE, system, kept, keep = {}, lambda: "You calculate.", lambda blocks: blocks, lambda ms: ms

%s

def run(sample, base_url, api_key):
    messages = sample["prompt"]
    while True:
        body = {"messages": keep(messages), "tools": [TOOL], "max_tokens": 1000, "system": system()}
        headers = {"x-api-key": api_key}
        data = json.dumps(body | MORE).encode()
        request = urllib.request.Request(base_url + "/messages", data, headers)
        blocks = json.load(urllib.request.urlopen(request, timeout=30))["content"]
        messages.append({"role": "assistant", "content": kept(blocks)})
        calls = [b["id"] for b in blocks if b["type"] == "tool_use"]
        if not calls:
            return
        results = [{"type": "tool_result", "tool_use_id": i, "content": "12"} for i in calls]
        messages.append({"role": "user", "content": results})
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that checks an agent; it returns the exit code and the output."""

    monkeypatch.chdir(tmp_path)

    def run(change: str = "", *options: str, as_program: bool = False) -> tuple[int, str]:
        Path("my_agent.py").write_text(AGENT % change)
        Path("function.py").write_text(FUNCTION)
        agent = ["--python", "function.py:run"]
        if as_program:
            agent = ["--", sys.executable, str(tmp_path / "my_agent.py")]
        result = CliRunner().invoke(app, ["check", "agent", *options, *agent])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


def test_an_agent_that_trains_cleanly(check):
    code, text = check(as_program=True)
    assert code == 0
    assert "2 episodes: 4 requests (2 first = 50%, 2 clean = 50%)" in text
    assert "4 turns in 2 rows of tokens (2.0 turns per row)" in text
    assert "0 tokens of prompts of further rows\nthe agent trains cleanly" in text


def test_sub_agents_may_each_have_a_request_on_its_way_when_the_episode_ends(check):
    code, text = check(SUB_AGENTS, as_program=True)
    assert code == 0, text
    assert "further conversations (sub-agents train as well): 2" in text


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ("SYSTEM = lambda: f'You calculate. {uuid.uuid4()}'", ["system message changed", "now  "]),
        (EDITS, ["assistant message changed", "LET ME SEE"]),
        (LOSES_TEXT, ["assistant message changed", "ids of their calls"]),
        (SENDS_TWICE, ["an earlier request was sent again", "x-stainless-retry-count"]),
        (DROPS, ["messages were removed", "Keep the history"]),
        (TOOLS, ["the tools changed"]),
        (TWO, ["2 requests refused (400): n=2", "2 episodes lost: agent.python raised HTTPError"]),
        (FORMAT, ["response_format must be of type text, json_object"]),
        ("URL = 'http://127.0.0.1:9'", ["2 episodes lost", "Connection refused"]),
        ("sys.exit()", ["without a request to OPENAI_BASE_URL or ANTHROPIC_BASE_URL"]),
        ("kept = lambda message: 1 / 0", ["ZeroDivisionError"]),
        (IGNORES, ["2 requests after the episode was over"]),
    ],
    ids=[
        "system",
        "edit",
        "text",
        "twice",
        "drop",
        "tools",
        "n",
        "format",
        "url",
        "silent",
        "crash",
        "ignores",
    ],
)
def test_a_fault_of_an_agent_is_named(check, change, problems):
    code, text = check(change)
    assert code == 1 and "problem: " in text
    for problem in problems:
        assert problem in text, text


def test_an_agent_with_typed_answers_trains_cleanly(check):
    code, text = check(TYPED)
    assert code == 0, text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("", ""),
        ("SYSTEM = lambda: f'You calculate. {uuid.uuid4()}'", "system message changed"),
        (
            "edit = lambda item: item | ({'content': 'x'} if item['type'] == 'message' else {})",
            "assistant message changed",
        ),
        ("edit = lambda item: item | {'arguments': '{}', 'call_id': 'x'}", "message changed"),
        ("more = lambda: {'tools': [{'type': 'web_search'}]}", "not 'web_search'"),
        ("more = lambda: {'previous_response_id': 'resp_x'}", "an answer that this session keeps"),
    ],
    ids=["clean", "system", "edit", "call", "tool", "previous"],
)
def test_an_agent_of_the_responses_api(check, change, problem):
    code, text = check(RESPONSES + change)
    assert code == bool(problem) and problem in text, text
    assert bool(problem) or "2 first = 50%, 2 clean = 50%" in text


def test_an_agent_that_hangs(check):
    code, text = check(HANGS, "--timeout", "2", "--rollouts", "1", as_program=True)
    assert code == 1 and "1 episode lost: the agent had not ended after 2 s" in text


def test_a_missing_package_of_a_program(check):
    code, text = check("import no_such_package", "--rollouts", "1", as_program=True)
    assert code == 1 and "No module named 'no_such_package'" in text
    assert "Install its package for the Python that agent.command runs" in text


def test_config_keys_come_before_the_command(check):
    code, text = check(HANGS, "rollout.timeout_s=2", "--rollouts", "1", as_program=True)
    assert code == 1 and "1 episode lost: the agent had not ended after 2 s" in text
    with pytest.raises(ConfigError, match=r"rollout\.timeout=2"):
        check(HANGS, "rollout.timeout=2")


def test_what_the_run_decides_is_counted(check):
    code, text = check("MORE = lambda: {'temperature': 0, 'tool_choice': 'required'}")
    assert code == 0
    assert "decided by the run, not by the agent: temperature (4 requests)" in text
    assert "tool_choice (4 requests)" in text


MISTAKEN = """
def kept(message):
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        if KIND == "unknown":
            {"calculator": 1}[call["function"]["name"]]
        if KIND == "arguments" and call["function"]["name"] == "calculator":
            (lambda expression: 1)(**arguments)
        if KIND == "raises":
            eval(arguments.get("expression", "1"))
    return message
KIND = %r
"""


@pytest.mark.parametrize(
    ("kind", "mistake", "error", "on_error"),
    [
        ("unknown", "an unknown tool", "KeyError: 'no_such_tool'", "zero"),
        ("arguments", "bad arguments", "unexpected keyword argument 'no_such_argument'", "zero"),
        ("raises", "a tool that raises", "SyntaxError", "zero"),
        ("raises", "a tool that raises", "SyntaxError", "drop"),
    ],
)
def test_a_mistake_of_the_policy_that_ends_the_agent(check, kind, mistake, error, on_error):
    Path("run.yaml").write_text(f"agent: {{on_error: {on_error}}}")
    options = ["--config", "run.yaml", "--rollouts", "1"]
    code, text = check(MISTAKEN % kind, *options, as_program=on_error == "drop")
    with_reward = "lost" if on_error == "drop" else "with reward 0 (agent.on_error=zero)"
    reason = "the agent exited with code 1" if on_error == "drop" else "agent.python raised"
    assert code == 1 and error in text and text.count("\nproblem: ") == 1, text
    assert f"problem: {mistake}: episode {with_reward}: {reason}" in text
    assert "Catch the error in the agent (try/except)" in text and "docs/agents.md" in text


def test_calls_in_another_json_form_train_cleanly(check):
    code, text = check(REWRITES)
    assert code == 0 and "2 realigned = 50%" in text
    assert 'was  \'\\n{"expression": "1+1"}\'' in text and '\\n "expression"' in text


def test_the_policy_writes_a_malformed_call(check):
    keeps = "kept = lambda m: (open('answers', 'a').write(json.dumps(m) + '\\n'), m)[1]"
    code, _ = check(keeps, "--rollouts", "1")
    first, last = map(json.loads, Path("answers").read_text().splitlines()[:2])
    assert code == 0 and len(first["tool_calls"]) == 1
    assert "Let me see." in first["content"] and '"name": "calculator"' in first["content"]
    assert last["content"] == "The answer is 42."


def test_rows_of_a_file(check, tmp_path):
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "Q"}], "agent_name": "external"}
    rows.write_text("\n".join(json.dumps(row) for _ in range(4)))
    code, text = check("", "--dataset", str(rows), "--rollouts", "1")
    assert code == 0 and "3 episodes" in text


def test_rows_with_images_need_a_model_that_reads_them(check, tmp_path):
    rows, image = tmp_path / "rows.jsonl", Image.of(PIL.new("RGB", (28, 28), "red"))
    row = {"prompt": [{"role": "user", "content": "<image>\nQ"}], "images": [data_url(image)]}
    rows.write_text(json.dumps(row | {"agent_name": "external"}))
    model = str(write_vision_model(tmp_path / "model"))
    code, text = check("", "--dataset", str(rows), "--model", model)
    assert code == 0 and "2 episodes: 4 requests (2 first = 50%, 2 clean = 50%)" in text
    code, text = check("", "--dataset", str(rows))
    assert code == 1 and "the policy reads none. Use a model" in text


def test_a_time_of_0_is_refused():
    result = CliRunner().invoke(app, ["check", "agent", "--timeout", "0", "--", "ls"])
    assert "rollout.timeout_s=0.0" in str(result.exception)


def test_an_agent_must_be_named():
    result = CliRunner().invoke(app, ["check", "agent"])
    assert "agent.command" in str(result.exception)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("", ""),
        ("system = lambda: f'You calculate. {uuid.uuid4()}'", "system message changed"),
        ("kept = lambda blocks: [b for b in blocks if b['type'] != 'text']",
         "assistant message changed"),
        ("keep = lambda ms: [*ms, {'role': 'assistant', 'content': 'It'}]",
         "2 requests refused (400): the last message must not be an assistant message"),
        ("MORE = {'tools': [{'type': 'web_search_20250305', 'name': 'web_search'}]}",
         "a tool that the agent runs, with name and input_schema, not 'web_search_20250305'"),
    ],
    ids=["clean", "system", "text", "prefill", "web search"],
)  # fmt: skip
def test_a_fault_of_an_agent_of_anthropics_api_is_named(tmp_path, change, problem):
    file = tmp_path / "function.py"
    file.write_text(MESSAGES_AGENT % change)
    result = CliRunner().invoke(app, ["check", "agent", "--python", f"{file}:run"])
    assert result.exit_code == bool(problem), result.output
    assert problem in result.output and ("problem: " in result.output) == bool(problem)
