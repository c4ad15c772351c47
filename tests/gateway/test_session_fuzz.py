"""Agents that do anything to their history: each sampled token trains once, with its logprob.

The engine samples random tokens with random logprobs and remembers them. Whatever the agent sends,
the trajectory must contain exactly these turns, and the prompt of each of them must be the part of
its row before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PIL
from support.any_template import tokenizer_of_trl
from support.vision import vision_tokenizer
from support.wires import WIRES

from agentrl.agent_loops import Episode, agent_loop
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play_episode
from agentrl.chat.images import openai_message
from agentrl.config import Config, RolloutConfig
from agentrl.engine.base import Sampler, Sampling
from agentrl.gateway.requests import Refusal
from agentrl.gateway.session import Session
from agentrl.images import Image, ImageRule
from agentrl.testing import byte_tokenizer, call
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Generation, Message, Sample, Trajectory, float_array, token_array

SAMPLE = Sample("s", (Message("user", "How much is 3*4?"),), agent_name="fuzzed_session")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {
        "type": "object", "properties": {"x": {"type": "string"}}}}}
    for name in ("calc", "search")
]  # fmt: skip
EXAMPLES = settings.default.max_examples
"""The profile has 20 examples, or 100 in `make test-all`. Each example is a session of 12 steps."""
PICTURES = [
    openai_message(Message.of("user", *parts))["content"]
    for red, blue in [[Image.of(PIL.new("RGB", (28, 28), color)) for color in ("red", "blue")]]
    for parts in (["Q", red], ["Q", blue], [red, "\nTime: 12:00", blue])
]
"""The contents of messages with images."""
SCHEMAS = ({"type": "object"}, {"type": "object", "required": ["x"]})


@dataclass
class Turn:
    """A turn as the engine sampled it."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    version: int
    images: list[str]


class RandomEngine(Sampler):
    """Samples random turns: texts, calls, malformed calls, thinking, cut turns."""

    max_length = 10**6

    def __init__(self, tokenizer, rng: random.Random, is_concurrent: bool):
        self.tokenizer, self.rng, self.is_concurrent = tokenizer, rng, is_concurrent
        self.turns: list[Turn] = []

    def begin(self, episode_id, *, awaited=True):
        pass

    def end(self, episode_id):
        pass

    def text(self) -> str:
        rng = self.rng
        calls = [call(rng.choice(["calc", "search"]), x=rng.choice(["1", "é\n", 1.0, {"a": [2]}]))
                 for _ in range(rng.choice([0, 0, 1, 1, 2]))]  # fmt: skip
        if rng.random() < 0.1:
            calls.append('<tool_call>\n{"name": "calc", "arguments"\n</tool_call>')
        said = rng.choice(["", "So.", "So. ", "\nLet me see", "x" * rng.randint(0, 5)])
        thought = "<think>\nhm\n</think>\n\n" if rng.random() < 0.2 else ""
        return thought + "\n".join([said, *calls])

    async def generate(self, prompt_ids, sampling, *, episode_id, seed, deadline, images=()):
        for _ in range(self.rng.randint(0, 3)):
            await asyncio.sleep(0)
        ids = self.tokenizer.encode(self.text(), add_special_tokens=False)
        if self.rng.random() < 0.1:  # tokens that no text is encoded as
            ids = [self.rng.randrange(97, 120) for _ in range(5)]
        ids = [*ids, sampling.stop_ids[0]][: sampling.max_tokens]
        is_cut = ids[-1] != sampling.stop_ids[0]
        logprobs = [*array("f", [-self.rng.random() for _ in ids])]
        seen = [image.key for image in images]
        turn = Turn([*prompt_ids], ids, logprobs, self.rng.randint(0, 3), seen)
        self.turns.append(turn)
        return Generation(
            token_array(ids),
            float_array(logprobs),
            token_array([turn.version] * len(ids)),
            "length" if is_cut else "stop",
            len(prompt_ids),
        )


class Client:
    """An agent that keeps a history for each of its conversations, and misuses it."""

    def __init__(
        self,
        session: Session,
        rng: random.Random,
        dialect: str,
        is_distinct: bool,
        pictures: Sequence[Any] = (),
    ):
        self.session, self.rng, self.wire = session, rng, WIRES[dialect]
        self.pictures = pictures
        self.is_distinct = is_distinct
        self.histories: list[list[dict]] = []
        self.answered: list[bytes] = []
        self.errors: Counter[str] = Counter()
        self.sampled = 0

    def new(self) -> list[dict]:
        rng = self.rng
        system = [{"role": "system", "content": rng.choice(["S", "T", "S\nToday's date is 1"])}]
        texts = ["How much is 3*4?", "Q", "R", *self.pictures]
        user = {"role": "user", "content": rng.choice(texts)}
        shots = [{"role": "assistant", "content": "shot"}, user] if rng.random() < 0.1 else []
        return [*(system if rng.random() < 0.5 else []), user, *shots]

    def body(self, history: list[dict]) -> bytes:
        tools = TOOLS if self.rng.random() < 0.9 else []
        limit = {"max_tokens": self.rng.randint(1, 8)} if self.rng.random() < 0.1 else {}
        schema = self.rng.choice(SCHEMAS) if self.rng.random() < 0.15 else None
        form = self.wire.output_format(schema) if schema else {}
        return self.wire.body(history, tools, **limit, **form)

    async def ask(self, history: list[dict], *, is_retry: bool = False) -> None:
        """Send a history, and add the answer and results of its calls."""
        if self.is_distinct:
            history[:] = distinct(history)
        body = self.body(history)
        dialect = self.wire.dialect
        headers = {"x-stainless-retry-count": str(int(is_retry))}
        request = dialect.read(body, headers, self.session.memory)
        if dialect.count_path:  # It changes nothing: the rows are those of the other dialects.
            with contextlib.suppress(Refusal):
                assert self.session.count_tokens(request) > 0
        task = asyncio.create_task(self.session.answer(request))
        if self.rng.random() < 0.05:  # the client loses the connection and sends it again
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            request = replace(request, is_retry=True)
            task = asyncio.create_task(self.session.answer(request))
        try:
            answer = await task
        except Refusal as e:
            self.errors[e.code] += 1
            return
        message = self.wire.message(dialect.write(answer, request))
        streamed = self.wire.streamed(dialect.events(answer, request))
        assert streamed == {"role": "assistant", **message}
        message["id"] = answer.id.removeprefix("chatcmpl-").replace("-", "_")
        history.append(self.rewritten(message))
        texts = ["12", "error", *self.pictures]
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": self.rng.choice(texts)}
            for c in message.get("tool_calls", ())
        ]
        self.rng.shuffle(results)
        history += results or [{"role": "user", "content": self.rng.choice(["Go on.", "Q"])}]

    def rewritten(self, message: dict) -> dict:
        """Return an answer as a client may keep it: the same, or written differently."""
        rng = self.rng
        message = json.loads(json.dumps(message))
        if rng.random() < 0.5:
            message.pop("reasoning_content", None)
        if rng.random() < 0.3:
            for c in message.get("tool_calls", ()):
                c["function"]["arguments"] = json.dumps(
                    json.loads(c["function"]["arguments"]), indent=1, sort_keys=True
                )
        if rng.random() < 0.1 and message.get("content"):
            message["content"] = f" {message['content']}\n"
        if rng.random() < 0.05:
            message["content"] = "rewritten"
        if rng.random() < 0.03:
            for i, c in enumerate(message.get("tool_calls", ())):
                c["id"] = f"own-{i}"
        return message

    async def step(self) -> None:
        """Do one thing to one conversation, and ask."""
        rng = self.rng
        if not self.histories or rng.random() < 0.15:
            self.histories.append(self.new())
        history = rng.choice(self.histories)
        action = rng.choice(
            ["go on"] * 6 + ["edit", "drop", "truncate", "copy", "insert", "again", "both", "mix"]
        )
        others = [h for h in self.histories if h is not history]
        if action == "edit":
            i = rng.randrange(len(history))
            pictures = self.pictures if history[i]["role"] in ("user", "tool") else ()
            history[i] = {**history[i], "content": rng.choice(["edited", "", "S", *pictures])}
        elif action == "drop" and len(history) > 2:
            del history[rng.randrange(len(history) - 1)]
        elif action == "truncate" and len(history) > 3:
            del history[rng.randrange(1, len(history)) :]
        elif action == "copy":
            history = [dict(m) for m in history]
            self.histories.append(history)
        elif action == "insert":
            said = {"role": rng.choice(["assistant", "user", "system"]), "content": "inserted"}
            history.insert(rng.randrange(len(history) + 1), said)
            history.append({"role": "user", "content": "after"})
        elif action == "mix" and others:
            history += [dict(m) for m in rng.choice(others) if m["role"] == "assistant"][:2]
            history.append({"role": "user", "content": "mixed"})
        if action == "again":
            await self.ask([dict(m) for m in history])
        if action == "both":
            copies = [[dict(m) for m in history] for _ in range(2)]
            await asyncio.gather(*map(self.ask, copies))
            history[:] = copies[0]
            return
        await self.ask(history)


def distinct(history: list[dict]) -> list[dict]:
    """Return a history without what items of the Responses API cannot tell apart.

    An answer is in it once, and no assistant message follows another one.
    """
    messages: list[dict] = []
    for message in history:
        if message["role"] == "assistant":
            if any(m.get("id") == message.get("id", "") for m in messages):
                continue
            if messages and messages[-1]["role"] == "assistant":
                messages.append({"role": "user", "content": "And?"})
        messages.append(message)
    return messages


def play(
    tokenizer,
    seed: int,
    steps: int,
    *,
    is_concurrent: bool,
    strip: bool = False,
    dialect: str = "chat_completions",
    is_distinct: bool = False,
    images: ImageRule | None = None,
):
    """Play one session of a random client; return the trajectory, the engine and the client."""
    rng = random.Random(seed)
    engine = RandomEngine(tokenizer, rng, is_concurrent)
    clients: list[Client] = []

    @agent_loop("fuzzed_session", uses_tools=False, uses_interaction=False)
    async def fuzzed(ep: Episode) -> None:
        session = Session(ep)
        client = Client(session, rng, dialect, is_distinct, PICTURES if images else ())
        clients.append(client)
        for _ in range(steps):
            await asyncio.gather(*(client.step() for _ in range(rng.choice([1, 1, 2, 3]))))
            if session.over.is_set():
                break
        if not ep.turns:  # The template has refused all of these histories.
            await client.ask([{"role": "user", "content": "plain"}])
        await session.close()
        assert session.failure is None, repr(session.failure)

    rollout = RolloutConfig(
        max_turns=rng.choice([5, 40]),
        max_tool_calls=rng.choice([3, 1000]),
        max_trajectory_tokens=rng.choice([300, 10**6]),
        history_thinking="strip" if strip else "keep",
    )
    config = Config(rollout=rollout)
    template = make_template(tokenizer, config, images=images)
    runtime = Runtime(engine, template, LocalToolbox(), config)
    trajectory = asyncio.run(
        play_episode(runtime, SAMPLE, episode_id="e", rollout=0, sampling=Sampling(), seed=0)
    )
    return trajectory, engine, clients[0]


def check(t: Trajectory, engine: RandomEngine) -> None:
    """Each turn of the engine is one turn of the trajectory, and nothing else trains."""
    remaining = [*engine.turns]
    trained = [[0] * len(s.response_mask) for s in t.segments]
    for turn in t.turns:
        segment = t.segments[turn.segment]
        row = [*segment.prompt_ids, *segment.response_ids]
        images = [image.key for image in segment.images]
        start, end = (len(segment.prompt_ids) + i for i in (turn.start, turn.end))
        logprobs = [*segment.logprobs[turn.start : turn.end]]
        same = [
            x
            for x in remaining
            if x.ids == row[start:end]
            and x.prompt == row[:start]
            and x.logprobs == logprobs
            and x.images == images[: len(x.images)]
        ]
        assert same, "the engine did not sample this turn after this prompt"
        assert [*segment.versions[turn.start : turn.end]] == [same[0].version] * (end - start)
        remaining.remove(same[0])
        for i in range(turn.start, turn.end):
            trained[turn.segment][i] += 1
    assert not remaining, f"{len(remaining)} sampled turns are lost"
    assert trained == [[*s.response_mask] for s in t.segments]
    assert len(t.answers) == len(t.turns)


@pytest.mark.parametrize("is_concurrent", [False, True], ids=["in turn", "concurrent"])
@pytest.mark.parametrize("dialect", WIRES)
@settings(max_examples=EXAMPLES * 2 // 3)
@given(seed=st.integers(0, 2**32))
def test_each_sampled_token_trains_once(dialect, is_concurrent, seed):
    tokenizer = byte_tokenizer()
    t, engine, _ = play(tokenizer, seed, 12, is_concurrent=is_concurrent, dialect=dialect)
    check(t, engine)


@pytest.mark.parametrize("dialect", WIRES)
@settings(max_examples=EXAMPLES // 4)
@given(seed=st.integers(0, 2**32))
def test_the_engine_sees_the_images_of_its_row(dialect, seed):
    tokenizer = vision_tokenizer()
    placeholder = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rule = ImageRule(placeholder, 14, 2, 28 * 28, 28 * 28)
    t, engine, _ = play(tokenizer, seed, 12, is_concurrent=True, dialect=dialect, images=rule)
    check(t, engine)
    assert all(turn.prompt.count(placeholder) == len(turn.images) for turn in engine.turns)


@pytest.mark.parametrize("dialect", [name for name in WIRES if name != "chat_completions"])
@pytest.mark.parametrize("strip", [False, True], ids=["keep", "strip"])
@settings(max_examples=EXAMPLES // 2)
@given(seed=st.integers(0, 2**32))
def test_the_rows_of_all_dialects_are_the_same(dialect, strip, seed):
    tokenizer = tokenizer_of_trl("qwen3")  # It has thinking.
    options = {"is_concurrent": True, "strip": strip, "is_distinct": dialect == "responses"}
    a, b = (
        play(tokenizer, seed, 12, dialect=name, **options) for name in ("chat_completions", dialect)
    )
    assert a[0].segments == b[0].segments and a[2].errors == b[2].errors
    assert [turn.thread for turn in a[0].turns] == [turn.thread for turn in b[0].turns]
    check(b[0], b[1])


@pytest.mark.parametrize("strip", [False, True], ids=["keep", "strip"])
@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "gptoss", "deepseekv3", "nemotron_3_nano"])
@settings(max_examples=EXAMPLES // 5)
@given(seed=st.integers(0, 2**32))
def test_each_sampled_token_trains_once_with_other_templates(name, strip, seed):
    t, engine, _ = play(tokenizer_of_trl(name), seed, 8, is_concurrent=True, strip=strip)
    check(t, engine)
