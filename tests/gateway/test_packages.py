"""Agents of real packages, unmodified: each token that the policy samples trains once."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support import agents_page
from support.any_template import tokenizer_of_trl

from agentrl import registry
from agentrl.agent_loops.play import play
from agentrl.config import AgentConfig, Config, RolloutConfig
from agentrl.data import load_samples
from agentrl.engine.scripted import Scripted
from agentrl.gateway import serve
from agentrl.gateway.agent import open_session
from agentrl.gateway.requests import ChatRequest
from agentrl.gateway.session import Session
from agentrl.testing import byte_tokenizer, call
from agentrl.trajectory import Message, Sample, Trajectory

HERE = Path(__file__).parent / "packages"
TOKENIZER = byte_tokenizer()
SAMPLE = Sample("r0", (Message("user", "How much is 3*4?"),), agent_name="external")
CALCULATE = call("calculator", expression="3*4")


REQUESTS: list[ChatRequest] = []
"""The requests of the agent that played last."""


class Watched(Session):
    """A session whose requests a test reads."""

    async def answer(self, request):
        REQUESTS.append(request)
        return await super().answer(request)


def run(
    python: str,
    agent: str,
    turns,
    engine: Callable[..., Scripted] = Scripted,
    tokenizer=TOKENIZER,
    **rollout,
) -> Trajectory:
    """Play an agent of `packages/`; check that each sampled turn is in one row, with mask 1."""
    script, *arguments = agent.split()
    command = " ".join([python, str(HERE / f"{script}.py"), *arguments])
    played = engine(turns, tokenizer)
    config = Config(agent=AgentConfig(command=command), rollout=RolloutConfig(**rollout))
    REQUESTS.clear()
    open_session.set(Watched)
    t = play(SAMPLE, played, tokenizer, config=config)
    assert len(t.turns) == len(played.requests) and t.stop_reason == "done"
    for turn in t.turns:
        segment = t.segments[turn.segment]
        row = [*segment.prompt_ids, *segment.response_ids[: turn.start]]
        assert any(row == [*request.prompt_ids] for request in played.requests)
        assert all(segment.response_mask[turn.start : turn.end])
    spans = [turn.end - turn.start for turn in t.turns]
    assert t.sampled_tokens == sum(spans)
    return t


@pytest.mark.parametrize(
    ("agent", "matched"),
    [
        pytest.param(
            "openai_client stream", "clean",
            marks=pytest.mark.proves("openai/chat", "streaming", "tools"),
        ),
        pytest.param(  # It writes arguments without spaces.
            "pydantic_ai_agent", "realigned", marks=pytest.mark.proves("pydantic-ai/chat", "tools")
        ),
        pytest.param(
            "anthropic_client stream", "clean",
            marks=pytest.mark.proves("anthropic/messages", "streaming", "tools"),
        ),
        pytest.param(
            "openai_responses stream", "clean",
            marks=pytest.mark.proves("openai/responses", "streaming", "tools"),
        ),
        ("openai_responses previous", "clean"),
        pytest.param(  # `test_sub_agents_at_the_same_time` plays it, too.
            "openai_agents responses", "clean",
            marks=[pytest.mark.slow, pytest.mark.proves("openai-agents/responses", "tools")],
        ),
        pytest.param(
            "langgraph_agent", "clean",
            marks=[pytest.mark.slow, pytest.mark.proves("langgraph/chat", "tools")],
        ),
        pytest.param(
            "openai_agents", "clean",
            marks=[pytest.mark.slow, pytest.mark.proves("openai-agents/chat", "tools")],
        ),
        pytest.param("anthropic_client", "clean", marks=pytest.mark.slow),
        pytest.param("openai_client", "clean", marks=pytest.mark.slow),
        pytest.param("openai_responses", "clean", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_plain_run_is_one_row(packages_python, agent, matched):
    t = run(packages_python, agent, ["Hm.\n" + CALCULATE, "It is 12."])
    assert t.counts == {"gateway/first": 1, f"gateway/{matched}": 1}
    assert len(t.segments) == 1 and t.final_text == "It is 12."
    assert [r.content for r in t.turns[0].tool_results] == ["12"]
    assert [request.stream for request in REQUESTS] == ["stream" in agent] * 2


CLIENTS = ["openai_client", "openai_responses", "anthropic_client"]
"""The agents with a client and no framework."""
ONE_BY_DEFAULT = ["openai_client", *(pytest.param(c, marks=pytest.mark.slow) for c in CLIENTS[1:])]
"""All clients share the code behind the dialects. `test_session_fuzz` compares their rows."""


@pytest.mark.proves("openai/chat openai/responses anthropic/messages", "thinking", "parallel calls")
@pytest.mark.parametrize("mode", [pytest.param("", marks=pytest.mark.slow), " stream"])
@pytest.mark.parametrize("agent", CLIENTS)
def test_a_client_keeps_thinking_and_parallel_calls(packages_python, agent, mode):
    both = f"<think>\nhm\n</think>\n\n{CALCULATE}\n" + call("calculator", expression="4 +")
    turns = [both, "<think>\nso\n</think>\n\nIt is 12."]
    t = run(packages_python, f"{agent} think{mode}", turns, tokenizer=tokenizer_of_trl("qwen3"))
    t.counts.pop("gateway/ignored/thinking", None)
    assert t.counts == {"gateway/first": 1, "gateway/clean": 1}
    assert [m.reasoning for m in REQUESTS[1].messages if m.role == "assistant"] == ["hm"]
    assert len(t.segments) == 1 and t.final_text.endswith("It is 12.")
    first, second = (r.content for r in t.turns[0].tool_results)
    assert first == "12" and second.startswith("Error: ")


@pytest.mark.proves("openai/chat openai/responses anthropic/messages", "compaction")
@pytest.mark.parametrize("agent", ONE_BY_DEFAULT)
def test_a_client_goes_on_from_a_summary(packages_python, agent):
    t = run(packages_python, f"{agent} summarize", [CALCULATE, "I know that it is 12.", "12."])
    assert t.counts == {"gateway/first": 1, "gateway/clean": 1, "gateway/spawn": 1}
    assert len(t.segments) == 2 and t.final_text == "12."
    assert "Summary: I know that it is 12." in TOKENIZER.decode(t.segments[1].prompt_ids)


def test_anthropics_client_edits_its_history(packages_python):
    t = run(packages_python, "anthropic_client trim", [CALCULATE, CALCULATE, "It is 12."])
    assert t.counts == {"gateway/first": 1, "gateway/clean": 1, "gateway/branch": 1}
    assert len(t.segments) == 2
    assert TOKENIZER.decode(t.segments[1].prompt_ids).count(CALCULATE) == 1


def answer_with_helpers(prompt: str, turn: int) -> str:
    """Call the calculator twice; a helper answers each call, after a call of its own."""
    has_result = "tool_response" in prompt
    if "You are a helper" in prompt:
        return "Twelve." if has_result else CALCULATE
    both = CALCULATE + "\n" + call("calculator", expression="4*3")
    return "It is 12." if has_result else both


@pytest.mark.proves("openai/chat openai/responses anthropic/messages", "sub-agents")
@pytest.mark.parametrize("agent", ONE_BY_DEFAULT)
def test_a_client_has_helpers_at_the_same_time(packages_python, agent):
    t = run(packages_python, f"{agent} helpers", answer_with_helpers)
    assert t.counts == {"gateway/first": 1, "gateway/spawn": 2, "gateway/clean": 3}
    assert len(t.segments) == 3 and len(t.turns) == 6 and t.final_text == "It is 12."
    assert [r.content for r in t.turns[0].tool_results] == ["Twelve."] * 2
    assert sorted(turn.thread for turn in t.turns) == [0, 0, 1, 1, 2, 2]


MISTAKES = {"openai_agents": call("no_such_tool"), "langgraph_agent": call("divide", a=1, b=0)}


@pytest.mark.parametrize(
    "agent", ["langgraph_agent", pytest.param("openai_agents", marks=pytest.mark.slow)]
)
def test_a_mistake_that_a_package_raises(packages_python, agent):
    config = Config(agent=AgentConfig(command=f"{packages_python} {HERE / agent}.py"))
    t = play(SAMPLE, Scripted([MISTAKES[agent]], TOKENIZER), TOKENIZER, config=config)
    assert (t.scores.outcome, t.stop_reason, len(t.turns)) == (0, "agent_error", 1), t.error
    assert {"openai_agents": "ModelBehaviorError", "langgraph_agent": "division"}[agent] in t.error
    t = run(packages_python, f"{agent} returns", [MISTAKES[agent], "It is 12."])
    (result,) = t.turns[0].tool_results
    assert result.content.startswith(("Error: division by zero", "Tool 'no_such_tool' not found"))
    assert t.final_text == "It is 12." and t.scores is None


@pytest.mark.proves("smolagents/chat", "tools")
def test_smolagents_rewrites_its_history(packages_python):
    """It sends the policy's calls as text in its own words, so each turn begins a row."""
    t = run(packages_python, "smolagents_agent", [CALCULATE, call("final_answer", answer="12")])
    assert t.counts["gateway/branch"] == 1 and len(t.segments) == 2
    assert "Calling tools" in TOKENIZER.decode(t.segments[1].prompt_ids)


def test_the_agent_of_the_recipe_is_shown_what_the_loop_shows(packages_python, own_registries):
    registry.load_file("shelf:calculator")
    recipes = Path(__file__).parents[2] / "recipes"
    sample = load_samples(str(recipes / "calculator/val.jsonl"))[0]
    as_agent = replace(sample, agent_name="external")
    as_loop = replace(sample, agent_name="tool_agent", tools=("calculator",))
    turns = [CALCULATE, call("calculator", expression="3 *"), "The answer is 12."]
    command = f"{packages_python} {recipes / 'my_agent/agent.py'}"
    config = Config(agent=AgentConfig(command=command))
    agent = play(as_agent, Scripted(turns, TOKENIZER), TOKENIZER, config=config)
    loop = play(as_loop, Scripted(turns, TOKENIZER), TOKENIZER)
    assert agent.counts == {"gateway/first": 1, "gateway/clean": 2}
    assert TOKENIZER.decode(agent.segments[0].prompt_ids) == TOKENIZER.decode(
        loop.segments[0].prompt_ids
    )
    first, second = (
        [r.content for turn in t.turns for r in turn.tool_results] for t in (agent, loop)
    )
    assert first[0] == second[0] == "12"
    assert first[1].startswith("Error: SyntaxError") and second[1].startswith("Error: '3 *' is not")
    assert agent.final_text == loop.final_text == "The answer is 12."


class SlowOnce(Scripted):
    """Its first turn takes longer than the client waits."""

    seconds = 1.2

    async def generate(self, *args, **kwargs):
        is_first = not self.requests
        generation = await super().generate(*args, **kwargs)
        await asyncio.sleep(self.seconds * is_first)
        return generation


class VerySlowOnce(SlowOnce):
    """Its first turn takes longer than the gateway waits before it sends headers."""

    seconds = serve.FIRST_WAIT_SECONDS + 1


@pytest.mark.proves("openai/chat openai/responses anthropic/messages", "retry")
@pytest.mark.parametrize(
    "agent",
    # Both APIs of OpenAI have the same client.
    [pytest.param(c, marks=pytest.mark.slow) if c == "openai_responses" else c for c in CLIENTS],
)
def test_a_retry_gets_the_same_answer(packages_python, agent):
    t = run(packages_python, f"{agent} retry", [CALCULATE, "It is 12."], SlowOnce)
    assert t.counts["gateway/retry"] >= 1 and len(t.turns) == 2 and len(t.segments) == 1


FRAMEWORKS = {
    "openai_agents": "realigned",
    "openai_agents responses": "clean",
    "pydantic_ai_agent": "realigned",
    "langgraph_agent": "realigned",
    "smolagents_agent": "branch",
}
"""The agents of a framework, and how a request after thinking is matched. The openai-agents of the
Responses API and pydantic-ai send the thinking back."""


def end_of(agent):
    """Return the last turn: smolagents has a tool for it."""
    return call("final_answer", answer="12") if agent == "smolagents_agent" else "It is 12."


@pytest.mark.slow
@pytest.mark.proves("openai-agents/responses pydantic-ai/chat", "thinking")
@pytest.mark.proves(
    "openai-agents/chat openai-agents/responses pydantic-ai/chat langgraph/chat smolagents/chat",
    "streaming",
    "parallel calls",
)
@pytest.mark.parametrize("mode", ["", " stream"])
@pytest.mark.parametrize("agent", FRAMEWORKS)
def test_a_framework_streams_thinks_and_calls_in_parallel(packages_python, agent, mode):
    both = f"<think>\nhm\n</think>\n\n{CALCULATE}\n" + call("calculator", expression="4 +")
    turns = [both, f"<think>\nso\n</think>\n\n{end_of(agent)}"]
    t = run(packages_python, agent + mode, turns, tokenizer=tokenizer_of_trl("qwen3"))
    t.counts.pop("gateway/ignored/tool_choice", None)
    assert t.counts == {"gateway/first": 1, f"gateway/{FRAMEWORKS[agent]}": 1}
    assert [request.stream for request in REQUESTS] == [bool(mode)] * 2
    sends_thinking = agent in ("openai_agents responses", "pydantic_ai_agent")
    thinking = [m.reasoning for m in REQUESTS[1].messages if m.role == "assistant"]
    assert thinking == ["hm" if sends_thinking else ""]
    if agent == "smolagents_agent":  # It writes both results into one message.
        assert all(text in REQUESTS[1].messages[-1].text for text in ("12", "Error: "))
    else:
        first, second = (m.text for m in REQUESTS[1].messages if m.role == "tool")
        assert first == "12" and second.startswith("Error: ")


@pytest.mark.slow
@pytest.mark.proves(
    "openai-agents/chat openai-agents/responses pydantic-ai/chat langgraph/chat smolagents/chat",
    "retry",
)
@pytest.mark.parametrize("agent", FRAMEWORKS)
def test_a_framework_sends_a_request_again(packages_python, agent):
    t = run(packages_python, f"{agent} retry", [CALCULATE, end_of(agent)], SlowOnce)
    assert t.counts["gateway/retry"] >= 1 and len(t.turns) == 2
    assert len(t.segments) == 1 + (agent == "smolagents_agent")


@pytest.mark.slow
@pytest.mark.proves("pydantic-ai/chat langgraph/chat", "sub-agents")
@pytest.mark.parametrize("agent", ["pydantic_ai_agent", "langgraph_agent"])
def test_a_framework_has_helpers_at_the_same_time(packages_python, agent):
    t = run(packages_python, f"{agent} helper", answer_with_helpers)
    t.counts["gateway/clean"] = t.counts.pop("gateway/realigned", 0) or t.counts["gateway/clean"]
    assert t.counts == {"gateway/first": 1, "gateway/spawn": 2, "gateway/clean": 3}
    assert len(t.segments) == 3 and len(t.turns) == 6 and t.final_text == "It is 12."
    assert [r.content for r in t.turns[0].tool_results] == ["Twelve."] * 2
    assert sorted(turn.thread for turn in t.turns) == [0, 0, 1, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.proves("smolagents/chat", "sub-agents")
def test_smolagents_asks_a_helper(packages_python):
    def answer(prompt: str, turn: int) -> str:
        turns = [call("helper", task="3*4?"), call("final_answer", answer="Twelve.")]
        return [*turns, call("final_answer", answer="12")][turn]

    t = run(packages_python, "smolagents_agent helper", answer)
    assert t.counts["gateway/spawn"] == 1 and [turn.thread for turn in t.turns] == [0, 1, 0]
    assert "Twelve." in REQUESTS[-1].messages[-1].text


@pytest.mark.slow
@pytest.mark.proves("openai-agents/chat openai-agents/responses", "compaction")
@pytest.mark.parametrize("api", ["", " responses"], ids=["chat", "responses"])
def test_openai_agents_drops_turns(packages_python, api):
    t = run(packages_python, f"openai_agents trim{api}", [CALCULATE] * 3 + ["12."])
    assert t.counts == {"gateway/first": 1, "gateway/clean": 1, "gateway/branch": 2}
    for segment in t.segments[1:]:
        assert TOKENIZER.decode(segment.prompt_ids).count(CALCULATE) == 1
    assert t.final_text == "12." and {turn.thread for turn in t.turns} == {0}


@pytest.mark.slow
def test_a_lost_answer_is_sent_again(packages_python):
    """Its connection broke after the gateway had sent it."""
    turns = [CALCULATE, "It is 12."]
    t = run(packages_python, "anthropic_client broken", turns)
    assert t.counts == {"gateway/first": 1, "gateway/retry": 1, "gateway/clean": 1}
    assert len(t.turns) == 2 and len(t.segments) == 1 and t.final_text == "It is 12."


@pytest.mark.proves("pydantic-ai/chat", "compaction")
def test_an_edited_history_begins_a_row(packages_python):
    """pydantic-ai drops the first turns. The tokens of those that stay are as they were sampled."""
    t = run(packages_python, "pydantic_ai_agent trim", [CALCULATE, CALCULATE, CALCULATE, "12."])
    assert t.counts["gateway/branch"] == 2 and len(t.segments) == 3
    for segment in t.segments[1:]:
        assert TOKENIZER.decode(segment.prompt_ids).count(CALCULATE) == 1
    assert t.final_text == "12." and {turn.thread for turn in t.turns} == {0}


@pytest.mark.proves("langgraph/chat", "compaction")
def test_a_compaction_begins_a_row(packages_python):
    """langgraph asks for a summary in a conversation of its own, and goes on from it."""

    def answer(prompt: str, turn: int) -> str:
        if "tools>" not in prompt:
            return "The user asked for 3*4."
        return "It is 12." if "summary of the conversation" in prompt else CALCULATE

    t = run(packages_python, "langgraph_agent summarize", answer)
    assert t.final_text == "It is 12." and len(t.segments) == 3
    assert "The user asked for 3*4." in TOKENIZER.decode(t.segments[-1].prompt_ids)


def test_a_typed_answer(packages_python):
    t = run(packages_python, "openai_responses parse", [CALCULATE, '{"value": 12}'])
    assert t.counts == {"gateway/first": 1, "gateway/clean": 1} and len(t.segments) == 1
    assert '"title":"Result"' in TOKENIZER.decode(t.segments[0].prompt_ids)


@pytest.mark.slow
def test_a_handoff_begins_a_row(packages_python):
    """The other agent has other instructions and tools."""
    turns = [CALCULATE + CALCULATE, call("transfer_to_checker"), '{"value": 12}']
    t = run(packages_python, "openai_agents responses handoff", turns)
    assert t.counts == {"gateway/first": 1, "gateway/clean": 1, "gateway/branch": 1}
    assert [r.content for r in t.turns[0].tool_results] == ["12", "12"]
    last = TOKENIZER.decode(t.segments[1].prompt_ids)
    assert "You check the result." in last and CALCULATE + CALCULATE in last
    assert '"title":"Result"' in last and t.final_text == '{"value": 12}'


@pytest.mark.proves("openai-agents/chat openai-agents/responses", "parallel calls", "sub-agents")
@pytest.mark.parametrize("api", ["", " responses"], ids=["chat", "responses"])
def test_sub_agents_at_the_same_time(packages_python, api):
    def answer(prompt: str, turn: int) -> str:
        for name in ("ada", "bob"):
            if f"You are {name}." in prompt:
                return CALCULATE if "tool_response" not in prompt else f"{name} says 12"
        both = call("ada", input="3*4?") + "\n" + call("bob", input="4*3?")
        return both if "tool_response" not in prompt else "It is 12."

    t = run(packages_python, f"openai_agents two{api}", answer)
    assert t.counts == {"gateway/first": 1, "gateway/spawn": 2, "gateway/clean": 3}
    assert len(t.segments) == 3 and len(t.turns) == 6 and t.final_text == "It is 12."
    assert [r.content for r in t.turns[0].tool_results] == ["ada says 12", "bob says 12"]
    assert sorted(turn.thread for turn in t.turns) == [0, 0, 1, 1, 2, 2]


def python_with(folder: Path, requirements: str) -> str:
    """Return the Python of a new environment with the packages of a file of `packages/`."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin/python")
    install = [python, "-m", "pip", "install", "-q", "--no-compile", "-r"]
    subprocess.run([*install, HERE / requirements], check=True)
    return python


@pytest.mark.proves(
    "claude-agent-sdk/messages", "streaming", "tools", "parallel calls", "thinking", "retry",
    "compaction", "sub-agents",
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_claude_code(tmp_path_factory):
    python = python_with(tmp_path_factory.mktemp("claude"), "claude_agent_sdk.txt")
    commands = ["echo $((3*4))", "echo b"]
    both = "\n".join(call("Bash", command=command, description="Print") for command in commands)
    turns = [f"<think>\nhm\n</think>\n\n{both}", "It is 12."]
    length = {"max_length": 10**6}  # Its prompt has 71,000 bytes.
    engine, slow = partial(Scripted, **length), partial(VerySlowOnce, **length)
    play_claude = partial(run, python, "claude_agent_sdk_agent", max_trajectory_tokens=10**6)
    t = play_claude(turns, engine, tokenizer_of_trl("qwen3"))
    assert [r.content for r in t.turns[0].tool_results] == ["12", "b"]
    assert all(request.stream for request in REQUESTS)
    assert [m.reasoning for m in REQUESTS[1].messages if m.role == "assistant"] == ["hm"]
    assert (t.counts["gateway/first"], t.counts["gateway/clean"]) == (1, 1)
    assert len(t.segments) == 1 and t.final_text.endswith("It is 12.")

    def answer(prompt: str, turn: int) -> str:
        if (
            "HELPER"
            in prompt.partition("<|im_start|>user")[2].partition("<|im_start|>assistant")[0]
        ):
            return "Twelve."
        task = {"description": "Multiply", "prompt": "HELPER: 3*4?", "run_in_background": False}
        helper = call("Agent", subagent_type="general-purpose", **task)
        return "It is 12." if "tool_response" in prompt else helper

    t = play_claude(answer, engine)
    (result,) = t.turns[0].tool_results
    assert "Twelve." in result.content and t.final_text == "It is 12."
    assert t.counts["gateway/spawn"] == 1 and [turn.thread for turn in t.turns] == [0, 1, 0]
    # This template refuses its system message; Claude Code sends the text in another one.
    t = play_claude(["It is 12."], engine, tokenizer_of_trl("qwen3_6"))
    assert t.counts["gateway/first"] == 1 and t.final_text == "It is 12."

    play_claude = partial(run, python, max_trajectory_tokens=10**6)
    t = play_claude("claude_agent_sdk_agent retry", [call("Bash", command="echo 12"), "12."], slow)
    assert t.counts["gateway/retry"] == t.counts["gateway/clean"] == 1
    assert len(t.turns) == 2 and len(t.segments) == 1

    def summarize(prompt: str, turn: int) -> str:
        last = prompt.rpartition("<|im_start|>user")[2]
        if "create a detailed summary" in last:
            return "<summary>They asked for 3*4.</summary>"
        return "Yes." if "Sure?" in last else "It is 12."

    t = play_claude("claude_agent_sdk_agent compact", summarize, engine)
    assert len(t.turns) == 3 and len(t.segments) == 2 and t.final_text == "Yes."
    last = TOKENIZER.decode(t.segments[1].prompt_ids)
    assert "They asked for 3*4." in last and "create a detailed summary" not in last


@pytest.mark.proves("mini-swe-agent/chat", "tools", "parallel calls", "thinking", "retry")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mini_swe_agent(tmp_path_factory):
    python = python_with(tmp_path_factory.mktemp("mini"), "mini_swe_agent.txt")
    both = "\n".join(call("bash", command=c) for c in ("echo $((3*4)) > x; cat x", "echo b"))
    end = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat x")
    turns = [f"<think>\nhm\n</think>\n\n{both}", end]
    t = run(python, "mini_swe_agent_agent", turns, tokenizer=tokenizer_of_trl("qwen3"))
    assert [m.reasoning for m in REQUESTS[1].messages if m.role == "assistant"] == ["hm"]
    assert t.counts == {"gateway/first": 1, "gateway/clean": 1} and len(t.segments) == 1
    assert [r.content.splitlines()[2] for r in t.turns[0].tool_results] == ["12", "b"]
    t = run(python, "mini_swe_agent_agent retry", [both, end], SlowOnce)
    assert t.counts["gateway/retry"] >= 1 and len(t.turns) == 2 and len(t.segments) == 1


@pytest.mark.proves(
    "codex/responses", "streaming", "tools", "parallel calls", "thinking", "retry", "compaction",
    "sub-agents",
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("npm"), reason="no npm")
def test_codex(tmp_path):
    package = (HERE / "npm.txt").read_text().strip()
    install = ["npm", "install", "--silent", "--prefix", str(tmp_path), package]
    subprocess.run(install, check=True)
    codex = tmp_path / "node_modules/.bin/codex"
    commands = ["echo $((3*4))", "echo b"]
    both = "".join(call("exec_command", cmd=command) for command in commands)
    turns = [f"<think>\nhm\n</think>\n\n{both}", "It is 12."]
    t = run(sys.executable, f"codex_agent {codex}", turns, tokenizer=tokenizer_of_trl("qwen3"))
    assert [m.reasoning for m in REQUESTS[1].messages if m.role == "assistant"] == ["hm"]
    assert t.counts == {"gateway/first": 1, "gateway/clean": 1} and len(t.segments) == 1
    assert ["12\n" in r.content for r in t.turns[0].tool_results] == [True, False]
    assert all(request.stream for request in REQUESTS)
    assert t.final_text.endswith("It is 12.")

    play_codex = partial(run, sys.executable, tokenizer=tokenizer_of_trl("qwen3"))
    turns = [call("exec_command", cmd="echo 12"), "It is 12."]
    t = play_codex(f"codex_agent {codex} retry", turns, VerySlowOnce)
    assert t.counts == {"gateway/first": 1, "gateway/retry": 1, "gateway/clean": 1}
    assert len(t.turns) == 2 and len(t.segments) == 1

    turns = [call("exec_command", cmd="echo 12"), "They asked for 3*4.", "It is 12."]
    t = play_codex(f"codex_agent {codex} compact", turns)
    assert len(t.turns) == len(t.segments) == 3 and t.final_text == "It is 12."
    last = [message.text for message in REQUESTS[2].messages]
    assert last[-1].endswith("They asked for 3*4.") and "How much is 3*4?" in last

    def answer(prompt: str, turn: int) -> str:
        conversation = prompt[prompt.index("<|im_start|>user") :]
        if "HELPER" in conversation.partition("<|im_start|>assistant")[0]:
            return "Twelve."
        if "Twelve." in conversation:
            return "It is 12."
        if found := re.search(r'"agent_id":"(.+?)"', conversation):
            return call("multi_agent_v1__wait_agent", targets=[found[1]])
        return call("multi_agent_v1__spawn_agent", message="HELPER: 3*4?")

    t = play_codex(f"codex_agent {codex} helper", answer)
    assert t.counts == {"gateway/first": 1, "gateway/spawn": 1, "gateway/clean": 2}
    assert sorted(turn.thread for turn in t.turns) == [0, 0, 0, 1] and len(t.segments) == 2
    assert t.final_text == "It is 12."


def test_the_table_of_the_docs_is_that_of_the_tests():
    assert agents_page.PAGE.read_text() == agents_page.page(), "run `make docs`"
