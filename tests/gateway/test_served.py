"""Served answers are compared with an evaluation, and turns of the server keep their tokens."""

import asyncio
from contextlib import closing
from dataclasses import replace

import httpx
import pytest

from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play
from agentrl.config import Config, RolloutConfig
from agentrl.gateway.serve import create_app
from agentrl.gateway.served import compare_served
from agentrl.gateway.stateless import StatelessSession, without_budgets
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.tools import LocalToolbox, tool
from agentrl.trajectory import Message, Sample

# The template writes spaces into the JSON, the policy does not.
CALL = '<tool_call>\n{"name":"doubled","arguments":{"x":3}}\n</tool_call>'
MALFORMED = '<tool_call>\n{"name": "doubled", \n</tool_call>'
SAMPLE = Sample("first", (Message("user", "Q"),), agent_name="tool_agent", tools=("doubled",))


@pytest.fixture(autouse=True)
def doubled(own_registries):
    @tool
    def doubled(x: int) -> int:
        """Double a number."""
        return 2 * x


def script(call=CALL, answer="It is 6."):
    return lambda prompt, turn: answer if "tool_response" in prompt else call


def compare(engine, sample=SAMPLE, served=None, **rollout):
    """Play a sample with a script, and compare it with what another script serves."""
    config, tokenizer = Config(rollout=RolloutConfig(**rollout)), byte_tokenizer()
    trajectory = play(sample, engine, tokenizer, config=config)
    server = served or engine
    runtime = Runtime(server, make_template(tokenizer, config), LocalToolbox(), config)

    async def run():
        try:
            return await compare_served(runtime, [trajectory])
        finally:
            await runtime.toolbox.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize("call", [CALL, f"Wait. {CALL}", CALL + MALFORMED, MALFORMED])
def test_equal_answers_have_equal_prompts(call):
    engine = Scripted(script(call), byte_tokenizer())
    result = compare(engine)
    assert result.is_equal and [*result.lines()] == ["1 of 1 row equal (2 turns compared)"]
    first, second, *served = [list(r.prompt_ids) for r in engine.requests]
    assert served == [first, second]


def test_react_and_a_turn_that_is_cut():
    action = 'Action: doubled\nAction Input: {"x": 3}\nObservation: made up'
    script = lambda prompt, turn: "Final Answer: 6" if "Observation: 6" in prompt else action  # noqa: E731
    result = compare(Scripted(script, byte_tokenizer()), replace(SAMPLE, agent_name="react"))
    assert [*result.lines()] == ["1 of 1 row equal (2 turns compared)"]
    long = Scripted(lambda prompt, turn: "a" * 50, byte_tokenizer())
    result = compare(long, replace(SAMPLE, agent_name="single_turn", tools=()), max_turn_tokens=9)
    assert [*result.lines()] == ["1 of 1 row equal (1 turn compared)"]


def test_a_difference_is_shown():
    served = Scripted(script(answer="It is 7."), byte_tokenizer())
    result = compare(Scripted(script(), byte_tokenizer()), served=served)
    assert not result.is_equal
    assert [*result.lines()] == [
        "row first, turn 2: the answers differ",
        "  eval    'It is 6.'",
        "  served  'It is 7.'",
        "0 of 1 row equal (2 turns compared)",
    ]


def test_edited_histories_are_left_out(own_registries):
    from agentrl.agent_loops import agent_loop

    @agent_loop("forgets")
    async def forgets(ep):
        await ep.generate()
        ep.branch([Message("user", "Again")])
        await ep.generate()

    sample = replace(SAMPLE, agent_name="forgets")
    result = compare(Scripted(lambda prompt, turn: "a", byte_tokenizer()), sample)
    assert not result.is_equal  # Nothing was compared.
    assert next(result.lines()).startswith("not compared in 1 row: their loop edits the history")


@pytest.mark.parametrize("is_edited", [False, True])
def test_the_server_knows_the_tokens_of_its_answers(is_edited):
    config = without_budgets(Config())
    engine = Scripted(lambda prompt, turn: CALL, byte_tokenizer())
    template = make_template(byte_tokenizer(), config)
    runtime = Runtime(engine, template, LocalToolbox(), config)
    session = StatelessSession(runtime, 1.0)
    tools = [{"type": "function", "function": {"name": "doubled", "parameters": {}}}]

    async def run():
        transport = httpx.ASGITransport(create_app(lambda key: session))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            messages = [{"role": "user", "content": "Q"}]
            for _ in range(2):
                body = {"messages": messages, "tools": tools}
                answer = (await client.post("/v1/chat/completions", json=body)).json()
                message = answer["choices"][0]["message"]
                if is_edited:
                    message["content"] = "Let me see."
                result = {"role": "tool", "content": "6", "tool_call_id": "other"}
                messages = [*messages, message, result]

    asyncio.run(run())
    with closing(runtime):
        prompt = template.decode(engine.requests[1].prompt_ids)
    assert ('"arguments":{"x":3}' in prompt) != is_edited
    assert ("Let me see." in prompt) == is_edited
