"""Messages that the policy did not write in its name, limits of one turn, and results of others."""

import pytest

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.control import EpisodeControl
from agentrl.agent_loops.play import play
from agentrl.config import Config, RolloutConfig
from agentrl.engine.scripted import Scripted
from agentrl.errors import UserCodeError
from agentrl.testing import byte_tokenizer, call
from agentrl.trajectory import Message, Sample, ToolCall, ToolResult

TOKENIZER = byte_tokenizer()
QUESTION = Message("user", "How much is 3*4?")


def run(loop, answers, **rollout):
    agent_loop("foreign_test")(loop)
    sample = Sample("s", (QUESTION,), agent_name="foreign_test")
    config = Config(rollout=RolloutConfig(**rollout))
    return play(sample, Scripted(answers, TOKENIZER), TOKENIZER, config=config)


def texts(segment, value):
    ids = zip(segment.response_ids, segment.response_mask, strict=True)
    return TOKENIZER.decode([i for i, m in ids if m == value])


def turn_of(text):
    return f"<|im_start|>assistant\n{text}<|im_end|>\n"


def test_a_foreign_message_has_mask_0_and_stays_in_the_row():
    async def loop(ep):
        await ep.generate()
        ep.observe(Message("user", "Ready?"), ep.foreign("Yes."), Message("user", "Go."))
        await ep.generate()

    t = run(loop, ["one", "two"])
    (segment,) = t.segments
    assert texts(segment, 1) == "one<|im_end|>two<|im_end|>"
    assert texts(segment, 0) == (
        "\n<|im_start|>user\nReady?<|im_end|>\n" + turn_of("Yes.")
        + "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip
    assert [m.content for m in t.answers] == ["one", "two"]
    assert [m.content for m in t.messages][1:] == ["one", "Ready?", "Yes.", "Go.", "two"]


def test_foreign_messages_may_follow_each_other_and_begin_a_row():
    async def loop(ep):
        calc = ToolCall("calc", {"x": "1"})
        ep.branch(
            [QUESTION, ep.foreign("", [calc]), Message("tool", "1"), ep.foreign("a"), QUESTION]
        )
        await ep.generate()
        ep.observe(ep.foreign("b"), Message("user", "c"))
        await ep.generate()
        sub = ep.spawn([QUESTION, ep.foreign("d"), ep.messages[-1], QUESTION])
        await sub.generate()

    t = run(loop, ["one", "two", "three"])
    first, second = t.segments
    prompt = TOKENIZER.decode(first.prompt_ids)
    assert turn_of(call("calc", x="1")) in prompt and turn_of("a") in prompt
    assert texts(first, 1) == "one<|im_end|>two<|im_end|>" and turn_of("b") in texts(first, 0)
    assert turn_of("d") + turn_of("two") in TOKENIZER.decode(second.prompt_ids)
    assert texts(second, 1) == "three<|im_end|>"


def test_a_limit_of_one_turn_does_not_end_the_episode():
    async def loop(ep):
        cut = await ep.generate(max_tokens=3)
        assert cut.content == "one" and ep.turns[0].finish_reason == "length"
        ep.observe(Message("user", "Go on."))
        await ep.generate(max_tokens=10**6)

    t = run(loop, ["one and more", "two"])
    assert t.stop_reason == "done" and [x.end - x.start for x in t.turns] == [3, 4]


def test_the_budget_of_a_turn_ends_the_episode_also_below_the_limit():
    async def loop(ep):
        await ep.generate(max_tokens=5)

    t = run(loop, ["one and more"], max_turn_tokens=5)
    assert t.stop_reason == "turn_tokens"


def test_results_of_calls_that_a_loop_ran_itself():
    async def loop(ep):
        await ep.generate()
        EpisodeControl(ep).record_results(
            ep.turns[0], [ToolResult("12"), ToolResult("no", ok=False)], 1.5
        )
        ep.observe(Message("tool", "12"), Message("tool", "no"))
        await ep.generate()

    two = call("calc", x="3*4") + "\n" + call("calc", x="?")
    t = run(loop, [two, "done"])
    assert [r.content for r in t.turns[0].tool_results] == ["12", "no"]
    assert t.turns[0].tool_seconds == 1.5 and [s.name for s in t.spans].count("tools") == 1
    t = run(loop, [two, "done"], max_tool_calls=1)
    assert t.stop_reason == "tool_calls" and len(t.turns) == 1


def test_the_main_conversation_and_the_outcome():
    async def loop(ep):
        await ep.generate()
        sub = ep.spawn("Q")
        await sub.generate()
        control = EpisodeControl(ep)
        control.make_main(sub)
        control.set_outcome(0.5)
        control.attempt.counts["gateway/clean"] += 2

    t = run(loop, ["one", "two"])
    assert t.final_text == "two" and [x.thread for x in t.turns] == [1, 0]
    assert t.scores.outcome == 0.5 and t.counts == {"gateway/clean": 2}


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", None])
def test_an_outcome_must_be_a_number(reward):
    async def loop(ep):
        await ep.generate()
        EpisodeControl(ep).set_outcome(reward)

    with pytest.raises(UserCodeError, match="must be a finite number"):
        run(loop, ["a"])


def test_the_opening_that_the_policy_never_saw_is_not_in_the_messages():
    async def loop(ep):
        ep.branch([Message("system", "S"), QUESTION], [])
        await ep.generate()

    t = run(loop, ["one"])
    assert [m.role for m in t.messages] == ["system", "user", "assistant"]
    assert t.turns[0].message_index == 2 and t.final_text == "one"
