"""A user played by a model: behind a URL, and by the run's own engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import replace

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from agentrl import play, registry
from agentrl.agent_loops.attempt import Runtime
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.data import check_samples
from agentrl.engine.base import Sampling
from agentrl.errors import DataError, Infrastructure, PromptTooLong, RunStopped
from agentrl.interactions import SimulatedUser
from agentrl.interactions.simulated_user import DONE, GREETING
from agentrl.rewards import Scorer, reward
from agentrl.rollout import Rollouts
from agentrl.testing import Scripted, byte_tokenizer, call
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Message, Sample

TOKENIZER = byte_tokenizer()
ROW = Sample(
    "r0",
    (Message("system", "The password is hunter2."), Message("user", "I want my money back.")),
    agent_name="tool_agent",
    interaction="simulated_user",
    interaction_kwargs={
        "goal": "a refund of order 17, paid with a card ending in 99",
        "persona": "Ada, who is in a hurry",
    },
)


class Server:
    """An OpenAI-compatible server whose model is a rule."""

    def __init__(self, rule):
        self.bodies, self.tokens, self.rule = [], [], rule
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def complete(request: Request):
            self.tokens.append(request.headers.get("authorization"))
            self.bodies.append(body := await request.json())
            answer = self.rule(body["messages"])
            if asyncio.iscoroutine(answer):
                answer = await answer
            if isinstance(answer, int):
                return JSONResponse({"error": "no"}, answer)
            return {"choices": [{"message": {"role": "assistant", "content": answer}}]}

        config = uvicorn.Config(app, port=0, log_level="error", ws="none", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"

    def close(self):
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=5)


@contextlib.contextmanager
def serving(rule):
    server = Server(rule)
    try:
        yield server
    finally:
        server.close()


def customer(messages):
    """Tells what it is asked for, and is done once the refund is said to be made."""
    heard = messages[-1]["content"].lower()
    if "refund is made" in heard:
        return f"Thank you! {DONE}"
    return "It is 17." if "order" in heard else "The card ends in 99." if "card" in heard else "Hm?"


def with_server(url, **kwargs):
    """The config of a run whose user is there."""
    kwargs = {"url": url, "model": "m", **kwargs}
    return Config.model_validate({"interaction": {"kwargs": {"simulated_user": kwargs}}})


def shown(trajectory):
    return [(m.role, m.content) for m in trajectory.messages]


SERVICE = ("Which order?", "Which card?", "The refund is made.")


def test_a_conversation_with_a_simulated_user_behind_a_url(monkeypatch):
    monkeypatch.setenv("USER_TOKEN", "s3cret")
    with serving(customer) as server:
        config = with_server(server.url, token_env="USER_TOKEN", max_tokens=33, temperature=0.5)
        t = play(ROW, Scripted(SERVICE, TOKENIZER), TOKENIZER, config=config)
    assert shown(t) == [
        ("system", "The password is hunter2."),
        ("user", "I want my money back."),
        ("assistant", "Which order?"),
        ("user", "It is 17."),
        ("assistant", "Which card?"),
        ("user", "The card ends in 99."),
        ("assistant", "The refund is made."),
    ]
    assert t.stop_reason == "done" and DONE not in str(t.messages)
    assert t.turn_rewards("turn") == 0
    # Roles are turned round; what the operator tells the assistant is not the user's to know.
    role, *talk = server.bodies[-1]["messages"]
    assert role["role"] == "system" and "hunter2" not in str(server.bodies)
    assert "Ada, who is in a hurry" in role["content"] and "order 17" in role["content"]
    assert [(m["role"], m["content"]) for m in talk] == [
        ("user", GREETING),
        ("assistant", "I want my money back."),
        ("user", "Which order?"),
        ("assistant", "It is 17."),
        ("user", "Which card?"),
        ("assistant", "The card ends in 99."),
        ("user", "The refund is made."),
    ]
    sampling = {k: server.bodies[0][k] for k in ("model", "max_tokens", "temperature")}
    assert sampling == {"model": "m", "max_tokens": 33, "temperature": 0.5}
    assert set(server.tokens) == {"Bearer s3cret"}


def test_the_simulated_user_sees_no_tool_calls():
    registry.load_file("shelf:calculator")
    row = replace(ROW, tools=("calculator",))
    texts = [call("calculator", expression="6*7"), "The refund is made: 42."]
    with serving(customer) as server:
        t = play(row, Scripted(texts, TOKENIZER), TOKENIZER, config=with_server(server.url))
    assert [m.role for m in t.messages][2:] == ["assistant", "tool", "assistant"]
    (body,) = server.bodies
    assert [m["content"] for m in body["messages"]][-1] == "The refund is made: 42."
    assert "tool_call" not in str(body) and "calculator" not in str(body)


def test_thoughts_of_both_models_are_removed():
    with serving(lambda m: f"<think>{DONE}? no</think>\n\nIt is 17.") as server:
        config = with_server(server.url, max_tokens=20)
        config = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"max_turns": 2})}
        )
        texts = ["<think>a trick</think>Which order?", "Hm."]
        t = play(ROW, Scripted(texts, TOKENIZER), TOKENIZER, config=config)
    assert shown(t)[3] == ("user", "It is 17.")
    assert server.bodies[0]["messages"][-1]["content"] == "Which order?"
    # It never ends: the episode does.
    assert t.stop_reason == "turns" and len(t.turns) == 2


def test_an_empty_answer_of_the_user_ends_the_episode():
    with serving(lambda messages: "  ") as server:
        t = play(ROW, Scripted(["Hi"], TOKENIZER), TOKENIZER, config=with_server(server.url))
    assert t.stop_reason == "done" and len(t.turns) == 1


def test_max_turns_of_its_own():
    row = replace(ROW, interaction_kwargs={**ROW.interaction_kwargs, "max_turns": 2})
    with serving(lambda messages: "Why?") as server:
        t = play(
            row, Scripted(["a", "b", "c"], TOKENIZER), TOKENIZER, config=with_server(server.url)
        )
    assert [m.content for m in t.messages][2:] == ["a", "Why?", "b", "Why?", "c"]
    assert t.stop_reason == "done" and len(server.bodies) == 2


def test_a_user_model_that_only_thinks_is_an_infrastructure_error():
    refused = pytest.raises(Infrastructure, match=r"simulated_user\.max_tokens, or turn")
    with serving(lambda messages: "<think>so long") as server, refused:
        play(ROW, Scripted(["a"], TOKENIZER), TOKENIZER, config=with_server(server.url))


def collect(config, answers, **sections):
    config = config.model_copy(update=sections)

    @reward("always_one")
    def always_one(trajectory) -> float:
        return 1.0

    scorer = Scorer(config.reward.model_copy(update={"function": "always_one"}))
    runtime = Runtime(Scripted(answers, TOKENIZER), ChatTemplate(TOKENIZER), LocalToolbox(), config)
    rollouts = Rollouts(runtime, scorer, seed=0)
    try:
        return rollouts.collect([ROW], n=4, sampling=Sampling(), step=1)
    finally:
        rollouts.close()


def test_a_server_that_is_down_is_asked_again_then_the_episode_is_played_again():
    failures = [500, 500, 500, 400]  # thrice in one episode's request, and one that nothing mends
    calls = []

    def rule(messages):
        calls.append(1)
        return failures.pop() if failures else DONE

    with serving(rule) as server:
        (group,) = collect(with_server(server.url), lambda prompt, turn: "Hi")
    assert len(group.scored) == 4 and not failures and len(calls) == 8
    assert [s.reward for s in group.scored] == [1.0] * 4
    attempts = sorted(s.trajectory.episode_id.count("+") for s in group.scored)
    assert sum(attempts) >= 1


def test_a_server_that_stays_down_stops_the_run_without_rewards_of_0():
    refused = pytest.raises(RunStopped, match=r"4 of 4 rollouts were dropped.*(\n.*)*status 400")
    with serving(lambda messages: 400) as server, refused:
        collect(with_server(server.url), lambda prompt, turn: "Hi")


@pytest.mark.timing
def test_a_slow_answer_is_an_infrastructure_error_and_a_spent_episode_is_not():
    async def slow(messages):
        await asyncio.sleep(5)
        return "late"

    with serving(slow) as server:
        engine = Scripted(["Hi"], TOKENIZER)
        started = time.monotonic()
        with pytest.raises(Infrastructure, match="no response before the deadline"):
            play(ROW, engine, TOKENIZER, config=with_server(server.url, timeout_s=0.2))
        config = with_server(server.url)
        config = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"timeout_s": 0.2})}
        )
        t = play(ROW, Scripted(["Hi"], TOKENIZER), TOKENIZER, config=config)
        assert t.stop_reason == "time" and len(t.turns) == 1
        assert time.monotonic() - started < 3


# -- the run's own engine --------------------------------------------------------------------------


def test_the_policy_plays_the_user():
    engine = Scripted(["Which order?", "It is 17.", "Refunded.", f"Thanks {DONE}"], TOKENIZER)
    t = play(ROW, engine, TOKENIZER)
    assert [m.content for m in t.messages][2:] == ["Which order?", "It is 17.", "Refunded."]
    assert t.stop_reason == "done"
    # What it said as the user is in the row, with mask 0; what it was asked there is not.
    (segment,) = t.segments
    sampled = bytes(
        i for i, m in zip(segment.response_ids, segment.response_mask, strict=True) if m and i < 256
    )
    assert sampled == b"Which order?Refunded."
    row = TOKENIZER.decode(list(segment.prompt_ids) + list(segment.response_ids))
    assert "It is 17." in row and "Ada" not in row and GREETING not in row
    prompt = TOKENIZER.decode(list(engine.requests[1].prompt_ids))
    assert prompt.startswith("<|im_start|>system\nYou play a user") and "hunter2" not in prompt
    assert prompt.endswith("<|im_start|>user\nWhich order?<|im_end|>\n<|im_start|>assistant\n")
    assert engine.requests[1].sampling.max_tokens == 256
    assert engine.playing == set()


def test_a_simulated_user_that_is_too_long_for_the_engine_is_no_budget_of_the_policy():
    long = replace(ROW, interaction_kwargs={"goal": "x" * 3000})
    engine = Scripted(["Hi", "no"], TOKENIZER, max_length=2000)
    message = r"plays the user has 3\d+ tokens, but the engine's context length is 2000"
    with pytest.raises(PromptTooLong, match=message):
        play(long, engine, TOKENIZER)
    config = Config()
    runtime = Runtime(engine, ChatTemplate(TOKENIZER), LocalToolbox(), config)
    rollouts = Rollouts(runtime, Scorer(config.reward), seed=0)
    requests = len(engine.requests)
    try:
        with pytest.raises(RunStopped, match="PromptTooLong"):
            rollouts.collect([long], n=1, sampling=Sampling(), step=0)
    finally:
        rollouts.close()
    assert len(engine.requests) == requests + 1, "the episode is not played again"


def test_the_local_engine_plays_both(tiny_model, tiny_tokenizer):
    """With the real engine, in step with other episodes: none waits for another."""
    from agentrl.engine.local import LocalEngine

    config = Config.model_validate(
        {"rollout": {"max_turns": 3, "max_turn_tokens": 16, "timeout_s": 60}}
    )
    with contextlib.closing(
        LocalEngine.load(tiny_model, tiny_tokenizer, deterministic=True)
    ) as engine:
        template = ChatTemplate.load(tiny_model)

        @reward("always_one")
        def always_one(trajectory) -> float:
            return 1.0

        scorer = Scorer(config.reward.model_copy(update={"function": "always_one"}))
        conversations = []
        for _ in range(2):
            rollouts = Rollouts(Runtime(engine, template, LocalToolbox(), config), scorer, seed=0)
            try:
                (group,) = rollouts.collect([ROW], n=4, sampling=Sampling(), step=1)
            finally:
                rollouts.close()
            conversations.append([shown(s.trajectory) for s in group.scored])
    assert conversations[0] == conversations[1] and len(conversations[0]) == 4
    assert len({str(t) for t in conversations[0]}) > 1, "each rollout has a user of its own"


# -- what may be asked for -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "config", "says"),
    [
        (
            {"goal": "g", "url": "http://x"},
            {},
            r"'url' can only be set in the config \(interaction",
        ),
        ({"goal": "g", "token_env": "HOME"}, {}, "'token_env' can only be set in the config"),
        ({"goal": "g"}, {"goal": "h"}, "'goal' is set twice: 'g' in the row and 'h' in"),
        ({}, {}, "missing argument 'goal'"),
        ({"goal": "g", "chat": 1}, {}, "'chat' is passed by agentrl"),
        ({"goal": " "}, {}, "'goal' is empty"),
        ({"goal": "g", "max_turns": 0}, {}, "'max_turns' must be a number above 0, not 0"),
        ({"goal": "g"}, {"url": "http://127.0.0.1:1/v1"}, "set both or neither"),
        ({"goal": "g"}, {"url": "localhost:1", "model": "m"}, "not a server's URL: 'localhost:1'"),
        (
            {"goal": "g"},
            {"url": "http://h/v1", "model": "m", "token_env": "NO_SUCH_TOKEN"},
            "there is no environment variable 'NO_SUCH_TOKEN'",
        ),
        ({"goal": "g"}, {"token_env": "HOME"}, "needs a url. Remove it"),
    ],
)
def test_arguments_are_checked_before_a_model_is_loaded(row, config, says):
    sample = replace(ROW, interaction_kwargs=row)
    with pytest.raises(DataError, match=says):
        check_samples([sample], "rows.jsonl", {"simulated_user": config})


def test_a_row_cannot_point_an_episode_at_a_url_unchecked_either():
    row = replace(ROW, interaction_kwargs={"goal": "g", "url": "http://127.0.0.1:9/v1"})
    with pytest.raises(DataError, match="only be set in the config"):
        play(row, Scripted(["Hi"], TOKENIZER), TOKENIZER)


def test_it_is_exported():
    assert registry.interactions.get("simulated_user") is SimulatedUser


# -- a real server ---------------------------------------------------------------------------------


@pytest.mark.sglang
def test_a_user_behind_sglang(sglang_server, monkeypatch):
    monkeypatch.setenv("SGLANG_TOKEN", sglang_server.token)
    config = with_server(
        f"{sglang_server.url}/v1", model="default", token_env="SGLANG_TOKEN", max_tokens=12
    )
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"max_turns": 3})}
    )
    for _ in range(10):
        script = Scripted(["Which order?", "Which card?", "Bye."], TOKENIZER)
        t = play(ROW, script, TOKENIZER, config=config)
        if len(t.messages) > 3:  # an untrained model may sample an empty text, which ends the talk
            break
    assert [m.role for m in t.messages][1:4] == ["user", "assistant", "user"]
    assert t.messages[3].content and t.stop_reason in ("done", "turns")
