"""Images that agents send, in each dialect: they enter rows as those of a row's prompt do."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64encode
from contextlib import closing

import pytest
from PIL import Image as PIL
from support.vision import vision_tokenizer, write_vision_model
from support.wires import WIRES

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.attempt import Runtime, make_template
from agentrl.agent_loops.play import play
from agentrl.chat.images import openai_message
from agentrl.config import Config, load_config
from agentrl.data import write_rows
from agentrl.data.recorded import Recorder
from agentrl.engine.scripted import Scripted
from agentrl.gateway.agent import describe_sample
from agentrl.gateway.memory import AnswerMemory
from agentrl.gateway.requests import Answer, ChatMessage, ChatRequest, Refusal
from agentrl.gateway.served import compare_served
from agentrl.gateway.session import Session
from agentrl.gateway.stateless import StatelessSession, without_budgets
from agentrl.images import PLACE, Image, ImageRule, data_url
from agentrl.record import METRICS, read_metrics
from agentrl.store import TrajectoryStore
from agentrl.testing import byte_tokenizer, call
from agentrl.tools import LocalToolbox, tool
from agentrl.trainer import Trainer
from agentrl.trajectory import Message, Sample

TOKENIZER = vision_tokenizer()
RULE = ImageRule(TOKENIZER.convert_tokens_to_ids("<|image_pad|>"), 14, 2, 28 * 28, 64 * 28 * 28)


def picture(units: int, color="red") -> Image:
    """Return an image of so many tokens."""
    return Image.of(PIL.new("RGB", (28 * units, 28), color))


PROMPT = (
    Message("system", "You look."),
    Message.of("user", picture(2), "Which is brighter?\n", picture(3, "blue"), picture(1)),
)
ENLARGE = call("enlarge", n=4)
PARTS = ["the part: ", picture(4, "green"), " of it"]


@pytest.fixture(autouse=True)
def enlarge(own_registries):
    @tool
    def enlarge(n: int):
        """Zoom."""
        return PARTS


def sent(*parts, role="user", **fields):
    """Return a message with texts and images, as chat completions have it."""
    return openai_message(Message.of(role, *parts)) | fields


async def ask(session, wire, history, **fields):
    request = wire.dialect.read(wire.body(history, **fields), {}, session.memory)
    answer = await session.answer(request)
    return wire.message(wire.dialect.write(answer, request))


def played(agent, turns, *, images=RULE, tokenizer=TOKENIZER, prompt=PROMPT):
    """Play `async def agent(session, sample)`; return trajectory, session and engine."""
    sessions = []

    @agent_loop("images_test")
    async def loop(ep):
        sessions.append(Session(ep))
        await agent(sessions[0], ep.sample)
        await sessions[0].close()
        if sessions[0].failure:
            raise sessions[0].failure

    sample, engine = Sample("s", prompt, agent_name="images_test"), Scripted(turns, tokenizer)
    return play(sample, engine, tokenizer, images=images), sessions[0], engine


def kinds(session):
    return [event.kind for event in session.events]


@pytest.mark.parametrize("name", WIRES)
def test_the_rows_of_each_dialect_are_those_of_our_own_loop(name):
    wire, turns = WIRES[name], [f"Hm.\n{ENLARGE}", "The left one."]

    async def agent(session, sample):
        tools = LocalToolbox().schemas(("enlarge",))
        history = describe_sample(sample)["prompt"]
        history.append(await ask(session, wire, history, tools=tools))
        id = history[-1]["tool_calls"][0]["id"]
        history.append(sent(*PARTS, role="tool", tool_call_id=id))
        history.append(await ask(session, wire, history, tools=tools))

    t, session, engine = played(agent, turns)
    loop = Sample("s", PROMPT, agent_name="tool_agent", tools=("enlarge",))
    expected_engine = Scripted(turns, TOKENIZER)
    expected = play(loop, expected_engine, TOKENIZER, images=RULE)
    assert t.segments == expected.segments and kinds(session) == ["first", "clean"]
    assert [i.tokens for i in t.segments[0].images] == [2, 3, 1, 4]
    assert [r.images for r in engine.requests] == [r.images for r in expected_engine.requests]
    assert [(m.role, m.content, m.images) for m in t.messages] == [
        (m.role, m.content, m.images) for m in expected.messages
    ]
    assert t.messages[1] is PROMPT[1], "the row's own message may have thinking tags"
    (result,) = t.turns[0].tool_results
    assert (result.content, result.images) == (f"the part: {PLACE} of it", (PARTS[1],))


def test_texts_between_images_are_joined_as_without_images():
    wire = WIRES["chat_completions"]
    text = {"type": "text", "text": f"a{PLACE}"}
    image = sent(picture(1))["content"]
    body = wire.body([{"role": "user", "content": [text, text, *image, text, *image, *image]}])
    (message,) = wire.dialect.read(body, {}, AnswerMemory()).messages
    assert message.text == f"a\ufffd\na\ufffd{PLACE}a\ufffd{PLACE}{PLACE}"
    assert message.images == (picture(1),) * 3


@pytest.mark.parametrize("name", WIRES)
def test_images_are_compared_by_their_bytes(name):
    wire = WIRES[name]

    async def agent(session, sample):
        history = [sent(picture(1), "Q")]
        history.append(await ask(session, wire, history))
        history.append(sent("And this? ", picture(2)))
        history.append(await ask(session, wire, history))
        history[0] = sent(picture(1, "blue"), "Q")  # The text and the size are the same.
        history.append(sent("Sure?"))
        await ask(session, wire, history)

    row = (Message.of("user", picture(1), "Q"),)
    t, session, _ = played(agent, ["one", "two", "three"], prompt=row)
    assert kinds(session) == ["first", "clean", "branch"]
    assert [[i.key for i in s.images] for s in t.segments] == [
        [picture(1).key, picture(2).key],
        [picture(1, "blue").key, picture(2).key],
    ]
    event = session.events[-1]
    assert event.cause == "user message changed" and event.index == 0
    assert event.before in f"{PLACE}Q\nimage({picture(1).key})" and event.before != event.after


@pytest.mark.parametrize("is_first", [False, True])
def test_a_message_whose_time_changed_keeps_its_image(is_first):
    async def agent(session, sample):
        wire, history = WIRES["chat_completions"], []
        for time, later in (("12:00", ["And?"]), ("12:01", ["And now?"])):
            parts = [f"Current time: {time}", picture(2)]
            history[:1] = [sent(*parts if is_first else reversed(parts))]
            if len(history) == 1:
                history.append(await ask(session, wire, history))
            history[2:] = map(sent, later)
            await ask(session, wire, history)

    t, session, _ = played(agent, ["one", "two", "three"])
    assert kinds(session) == ["first", "clean", "branch"]
    assert session.events[-1].index == 2, "the time makes no difference"
    assert [[i.tokens for i in s.images] for s in t.segments] == [[2], [2]]
    assert "time: 12:01" in TOKENIZER.decode(t.segments[1].prompt_ids)


def test_an_image_ends_a_volatile_line():
    async def agent(session, sample):
        wire, header = WIRES["chat_completions"], "x-anthropic-billing-header: a"
        history = [sent(header, picture(1), "What is it?")]
        history += [await ask(session, wire, history), sent("Sure?")]
        history[0] = sent(header, picture(1), "Who is it?")
        await ask(session, wire, history)

    t, session, _ = played(agent, ["one", "two"])
    assert kinds(session) == ["first", "branch"]
    assert "Who is it?" in TOKENIZER.decode(t.segments[1].prompt_ids)


def test_an_episode_holds_each_image_once():
    """Agents that keep the last screenshots alone send them again in each new row."""

    async def agent(session, sample):
        wire, history = WIRES["chat_completions"], [sent("Q")]
        for i in range(5):
            history.append(await ask(session, wire, history))
            history.append(sent(picture(1 + i), "And this?"))
            history[:] = [*history[:2], *history[-4:]]
        await ask(session, wire, history)

    t, session, _ = played(agent, ["one", "two", "three", "four", "five", "six"])
    images = [image for m in t.messages for image in m.images]
    assert kinds(session).count("branch") == 4 and len(images) > 5
    assert len({id(image) for image in images}) == 5


def test_counted_tokens_are_those_of_the_prompt():
    async def agent(session, sample):
        wire = WIRES["messages"]
        request = wire.dialect.read(wire.body([sent(picture(5), "Q")]), {}, session.memory)
        counted = session.count_tokens(request)
        assert counted == (await session.answer(request)).prompt_tokens
        broken = wire.dialect.read(wire.body([sent(BROKEN)]), {}, session.memory)
        with pytest.raises(Refusal) as e:
            session.count_tokens(broken)
        assert (e.value.status, e.value.code) == (400, "image")

    played(agent, ["one"])


BROKEN = Image(picture(4).data[:20])
CUT = Image(picture(4).data[:60])


def gif() -> Image:
    file, frames = io.BytesIO(), [PIL.new("RGB", (28, 28), color) for color in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return Image(file.getvalue())


@pytest.mark.parametrize(
    ("image", "why"),
    [(BROKEN, "cannot be decoded"), (CUT, "cannot be decoded"), (gif(), "2 frames"),
     (Image(b"abc"), "no image that Pillow")],
    ids=["header", "cut", "frames", "text"],
)  # fmt: skip
@pytest.mark.parametrize("name", WIRES)
def test_a_damaged_image_is_refused_and_the_episode_goes_on(name, image, why):
    wire = WIRES[name]
    url = f"data:image/png;base64,{b64encode(image.data).decode()}"
    damaged = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    async def agent(session, sample):
        history = [sent("Q")]
        history.append(await ask(session, wire, history))
        with pytest.raises(Refusal, match=why) as e:
            await ask(session, wire, [*history, damaged])
        assert (e.value.status, e.value.code) == (400, "image")
        await ask(session, wire, [*history, sent(picture(1))])

    t, session, _ = played(agent, ["one", "two"])
    assert kinds(session) == ["first", "clean"] and len(t.segments) == 1


@pytest.mark.parametrize("name", WIRES)
def test_a_model_without_images_refuses_them(name):
    wire = WIRES[name]

    async def agent(session, sample):
        for refused in ([sent(picture(1))], [sent("Q"), sent("a", picture(1), role="system")]):
            request = wire.dialect.read(wire.body(refused), {}, session.memory)
            for send in (session.answer, session.count_tokens):
                with pytest.raises(Refusal, match="the policy reads none") as e:
                    await send(request)
                assert (e.value.status, e.value.code) == (400, "image")
        await ask(session, wire, [sent("Q")])

    prompt, tokenizer = (Message("user", "Q"),), byte_tokenizer()
    _, session, _ = played(agent, ["one"], images=None, tokenizer=tokenizer, prompt=prompt)
    assert kinds(session) == ["first"]


URL = "https://example.com/a.png"
REFUSED = {
    "chat_completions": [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": "data:image/png,abc"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "image_url", "image_url": data_url(picture(1))},
        {"type": "image_url"},
    ],
    "messages": [
        {"type": "image", "source": {"type": "url", "url": URL}},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": 5}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "%"}},
    ],
    "responses": [
        {"type": "input_image", "image_url": URL},
        {"type": "input_image", "file_id": "f"},
        {"type": "input_image", "image_url": {"url": data_url(picture(1))}},
    ],
}


@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, parts in REFUSED.items() for part in parts]
)
def test_an_image_that_is_not_in_the_request_is_refused(name, part):
    read = WIRES[name].dialect.read
    messages = [{"role": "user", "content": [{"type": "text", "text": "Q"}, part]}]
    body = json.dumps({"input": messages} if name == "responses" else {"messages": messages})
    with pytest.raises(Refusal, match=r"data URL|has 0 bytes") as e:
        read(body.encode(), {}, AnswerMemory())
    assert e.value.status == 400


@pytest.mark.parametrize("name", WIRES)
def test_an_image_of_the_assistant_is_refused(name):
    wire = WIRES[name]
    (image,) = sent(picture(1))["content"]
    if name == "messages":
        (image,) = json.loads(wire.body([sent(picture(1))]))["messages"][0]["content"]
    elif name == "responses":
        image = {"type": "input_image", "image_url": image["image_url"]["url"]}
    messages = [{"role": "assistant", "content": [image]}, {"role": "user", "content": "Q"}]
    body = json.dumps({"input": messages} if name == "responses" else {"messages": messages})
    with pytest.raises(Refusal, match="the policy writes no images"):
        wire.dialect.read(body.encode(), {}, AnswerMemory())


def test_a_response_is_continued_with_its_images():
    wire = WIRES["responses"]

    async def agent(session, sample):
        first = await ask(session, wire, [sent(picture(2), "Q")])
        previous = {"previous_response_id": f"resp_{first['id']}"}
        await ask(session, wire, [sent("And this? ", picture(3))], **previous)

    t, session, _ = played(agent, ["one", "two"])
    assert kinds(session) == ["first", "clean"]
    assert [i.tokens for i in t.segments[0].images] == [2, 3]


def test_the_memory_of_answers_counts_images():
    wire, memory = WIRES["responses"], AnswerMemory(limit=30_000)
    noise = PIL.effect_noise((100, 100), 50)
    size = len(Image.of(noise).data)
    assert 9_000 < size < 12_000
    for i in range(4):
        noise.putpixel((0, 0), i)
        request = wire.dialect.read(wire.body([sent(Image.of(noise))]), {}, memory)
        memory.keep(request, Answer(f"chatcmpl-aaaaaaaaaaaaaaaa-{i}", "a"))
    assert [bool(memory.find(f"chatcmpl-aaaaaaaaaaaaaaaa-{i}")) for i in range(4)] == [
        False, False, True, True
    ]  # fmt: skip


def test_a_conversation_with_many_images_outlasts_a_sub_agent():
    memory, ids = AnswerMemory(), [f"chatcmpl-aaaaaaaaaaaaaaaa-{i}" for i in range(2)]
    images = tuple([Image(bytes([i]) + bytes(2**20)) for i in range(20)])
    for id, message in zip(
        ids, (ChatMessage("user", PLACE * 20, images=images), ChatMessage("user", "Q")), strict=True
    ):
        memory.keep(ChatRequest((message,), kept=(message,)), Answer(id, "a"))
    assert all(map(memory.find, ids))


SCHEMA = {"type": "object", "title": PLACE}


@pytest.mark.parametrize("schema", [None, SCHEMA])
def test_a_served_policy_sees_what_it_has_seen_in_training(schema, tmp_path):
    wire = WIRES["chat_completions"]
    form = wire.output_format(schema) if schema else {}

    async def agent(session, sample=None):
        history = [sent(picture(2), "Q")]
        history.append(await ask(session, wire, history, **form))
        history.append(sent("And ", picture(3)))
        await ask(session, wire, history, **form)

    t, *_ = played(agent, ["{ }", "{}"])
    row = [*t.segments[0].prompt_ids, *t.segments[0].response_ids]
    config = without_budgets(Config())
    engine = Scripted(lambda prompt, turn: "{}" if "And" in prompt else "{ }", TOKENIZER)
    runtime = Runtime(engine, make_template(TOKENIZER, config, images=RULE), LocalToolbox(), config)
    with closing(runtime):
        asyncio.run(agent(StatelessSession(runtime, 1.0)))
        ends = [len(t.segments[0].prompt_ids) + turn.start for turn in t.turns]
        assert [[*r.prompt_ids] for r in engine.requests] == [row[:end] for end in ends]
        assert [[i.tokens for i in r.images] for r in engine.requests] == [[2], [2, 3]]
        policy = {"id": "p", "model": "m", "run": "r", "step": 0, "vocabulary": "v"}
        with (
            closing(Recorder(tmp_path, policy)) as recorder,
            pytest.raises(Refusal, match="it records no images"),
        ):
            asyncio.run(agent(StatelessSession(runtime, 1.0, recorder)))


def test_a_served_policy_tells_conversations_apart_by_their_images():
    wire, config = WIRES["chat_completions"], without_budgets(Config())
    engine = Scripted(lambda prompt, turn: "{}", TOKENIZER)
    runtime = Runtime(engine, make_template(TOKENIZER, config, images=RULE), LocalToolbox(), config)

    async def use(session):
        await ask(session, wire, [sent(picture(2), "Q")], **wire.output_format(SCHEMA))
        for number in (2, 3):
            later = [{"role": "assistant", "content": "a"}, sent("Go on.")]
            await ask(session, wire, [sent(picture(number), "Q"), *later])

    with closing(runtime):
        asyncio.run(use(StatelessSession(runtime, 1.0)))
    prompts = [TOKENIZER.decode(r.prompt_ids) for r in engine.requests]
    assert ["JSON schema" in prompt for prompt in prompts] == [True, True, False]


def test_served_answers_about_images_are_those_of_an_evaluation():
    def script(prompt, turn):
        return "The left one." if "tool_response" in prompt else ENLARGE

    engine, config = Scripted(script, TOKENIZER), Config()
    sample = Sample("s", PROMPT, agent_name="tool_agent", tools=("enlarge",))
    t = play(sample, engine, TOKENIZER, images=RULE)
    runtime = Runtime(engine, make_template(TOKENIZER, config, images=RULE), LocalToolbox(), config)

    async def run():
        try:
            return await compare_served(runtime, [t])
        finally:
            await runtime.toolbox.aclose()

    result = asyncio.run(run())
    assert result.is_equal, [*result.lines()]
    first, second, *served = [([*r.prompt_ids], r.images) for r in engine.requests]
    assert served == [first, second] and len(second[1]) == 4


AGENT = """
import httpx

async def run(sample, base_url, api_key):
    messages = sample["prompt"]
    async with httpx.AsyncClient(headers={"x-api-key": api_key}, timeout=120) as client:
        for image in messages[0]["content"][:1] * 2:
            body = {"messages": messages, "max_tokens": 8}
            answer = await client.post(base_url + "/chat/completions", json=body)
            if answer.status_code != 200:  # The policy sampled a placeholder.
                break
            messages.append(answer.json()["choices"][0]["message"])
            messages.append({"role": "user", "content": [image, dict(type="text", text="And?")]})
    return len(messages[1]["content"]) % 3
"""


@pytest.mark.slow
def test_a_policy_is_trained_on_the_images_of_an_agent(tmp_path):
    """Learner and engine agree about each sampled token, before and after a step."""
    row = {"prompt": [{"role": "user", "content": "<image>\nWhich color?"}]}
    images = [[picture(n, color).data] for n, color in ((2, "red"), (3, "blue"))]
    write_rows(tmp_path / "rows.parquet", [row | {"images": i} for i in images])
    (tmp_path / "my_agent.py").write_text(AGENT)
    words = [
        f"data.train={tmp_path / 'rows.parquet'}",
        "data.batch_size=2",
        "data.agent_name=external",
        f"agent.python={tmp_path / 'my_agent.py'}:run",
        "agent.reward=post",
        f"model.path={write_vision_model(tmp_path / 'model')}",
        "rollout.name=local",
        "rollout.n=4",
        "trainer.device=cpu",
        "trainer.total_steps=2",
        "trainer.save_freq=never",
        "trainer.val_before_train=false",
        f"trainer.output={tmp_path / 'run'}",
    ]
    Trainer(load_config(None, words)).run()
    history = [metrics for _, metrics in read_metrics(tmp_path / "run" / METRICS)]
    assert len(history) == 2 and all(metrics["actor/grad_norm"] > 0 for metrics in history)
    assert max(metrics["rollout_corr/logprob_diff_mean"] for metrics in history) < 1e-4
    stored = [s.scored.trajectory for s in TrajectoryStore(tmp_path / "run/trajectories").read()]
    assert len(stored) == 16
    assert all(len(t.segments) == 1 for t in stored)
    images = [(len(t.turns), len(t.segments[0].images)) for t in stored]
    assert images.count((2, 2)) > 8 and {*images} <= {(1, 1), (2, 2)}
