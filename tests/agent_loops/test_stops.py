"""The ends of turns: several EOS ids, tokens of the next role, stop texts, budgets."""

from collections import Counter

import pytest
from support.families import FAMILIES, family_tokenizer

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.attempt import cut_at_stop
from agentrl.agent_loops.play import play
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.scripted import Scripted
from agentrl.errors import UserCodeError
from agentrl.testing import byte_tokenizer, react_call
from agentrl.tools import tool
from agentrl.trajectory import Generation, Message, Sample, float_array, token_array

BYTES = byte_tokenizer()
TEMPLATE = ChatTemplate(BYTES)
ASK = Message("user", "How much is 3*4?")


@tool(name="twelve")
def twelve() -> str:
    """Say twelve."""
    return "12"


class Ends(Scripted):
    """Ends each turn with a token of its own; None: with none, as where a stop text ended it."""

    def __init__(self, answers, tokenizer, ends):
        super().__init__(answers, tokenizer)
        self._ends = iter(ends)

    def _until_stop(self, text, sampling):
        end = next(self._ends)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return (ids if end is None else [*ids, self._tokenizer.convert_tokens_to_ids(end)]), True


async def says_twice(ep):
    await ep.generate()
    ep.observe(Message("user", "Sure?"))
    await ep.generate()


@pytest.fixture(autouse=True)
def loops():
    agent_loop("says_twice")(says_twice)


def test_every_eos_ends_a_turn_and_is_appended_once():
    """`<|endoftext|>` in place of `<|im_end|>`: what was sampled closes the turn, nothing else."""
    for end, mask in (("<|im_end|>", 1), ("<|endoftext|>", 1), (None, 0)):
        tokenizer = family_tokenizer("qwen2_5")
        ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
        template = ChatTemplate(tokenizer, ends)
        assert set(template.stop_ids) == set(ends)
        row = template.prompt([ASK])
        sampled = tokenizer.encode("twelve")
        sampled += [tokenizer.convert_tokens_to_ids(end)] if end else []
        history = [ASK, Message("assistant", "twelve")]
        delta = template.delta(history, [Message("user", "Sure?")], sampled[-1])
        closes = [i for i in [*sampled, *delta] if i in ends]
        # One token closes the assistant's turn, one the user's.
        assert len(closes) == 2 and (closes[0] in sampled) == bool(mask)
        text = tokenizer.decode([*row, *sampled, *delta])
        assert text.endswith(
            f"twelve{end or '<|im_end|>'}\n<|im_start|>user\nSure?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


@pytest.mark.parametrize(
    ("end", "after", "between"),
    [
        ("<|observation|>", "tool", "<|observation|>\n<tool_response>\n12\n</tool_response>"),
        ("<|user|>", "user", "<|user|>\nSure?"),
        # It meant to hand over to the other role: its token stands, the true role follows.
        ("<|user|>", "tool", "<|user|><|observation|>\n<tool_response>\n12\n</tool_response>"),
        ("<|endoftext|>", "user", "<|endoftext|><|user|>\nSure?"),
        (None, "user", "<|user|>\nSure?"),
    ],
)
def test_glm_ends_a_turn_with_the_token_of_the_next_role(end, after, between):
    tokenizer = family_tokenizer("glm4moe")
    family = FAMILIES["glm4moe"]
    template = ChatTemplate(tokenizer, tokenizer.convert_tokens_to_ids(list(family.end_ids)))
    assert {tokenizer.decode([i]) for i in template.stop_ids} == {
        "<|user|>",
        "<|observation|>",
        "<|endoftext|>",
    }
    sampled = tokenizer.encode("twelve", add_special_tokens=False)
    sampled += [tokenizer.convert_tokens_to_ids(end)] if end else []
    new = Message("tool", "12") if after == "tool" else Message("user", "Sure?")
    delta = template.delta([ASK, Message("assistant", "twelve")], [new], sampled[-1])
    assert tokenizer.decode([*sampled, *delta]) == f"twelve{between}<|assistant|>"


def test_gpt_oss_ends_answers_with_return_and_calls_with_call():
    tokenizer = family_tokenizer("gptoss")
    ends = tokenizer.convert_tokens_to_ids(list(FAMILIES["gptoss"].end_ids))
    template = ChatTemplate(tokenizer, ends)
    # <|end|> stands between the messages of one turn: it must not end it.
    assert {tokenizer.decode([i]) for i in template.stop_ids} == {
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
    }
    returned = tokenizer.convert_tokens_to_ids("<|return|>")
    delta = template.delta([ASK, Message("assistant", "")], [Message("user", "Sure?")], returned)
    assert tokenizer.decode(delta).startswith("<|start|>user<|message|>Sure?<|end|>")


@pytest.mark.parametrize(("end", "mask"), [("<|im_end|>", 1), (None, 0)])
def test_a_finished_turn_is_closed_once_sampled_1_appended_0(end, mask):
    engine = Ends(["a", "b"], BYTES, [end, end])
    t = play(Sample("s", (ASK,), agent_name="says_twice"), engine, BYTES)
    [segment] = t.segments
    upto = slice(t.turns[0].start, t.turns[1].start)
    after, masks = list(segment.response_ids[upto]), list(segment.response_mask[upto])
    user = after.index(ord("S"))
    close = BYTES.convert_tokens_to_ids("<|im_end|>")
    assert [m for i, m in zip(after[:user], masks, strict=False) if i == close] == [mask]


# -- react ----------------------------------------------------------------------------------------


def react(answers, engine=Scripted, **kwargs):
    sample = Sample("s", (ASK,), agent_name="react", tools=("twelve",))
    return play(sample, engine(answers, BYTES, **kwargs), BYTES)


def test_react_never_trains_on_an_observation_it_made_up():
    """An engine that looks for stop texts late hands over what was sampled after them."""

    class Late(Scripted):
        def _until_stop(self, text, sampling):
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            return [*ids, sampling.stop_ids[0]], True

    made_up = react_call("twelve") + " 13\nFinal Answer: 13"
    t = react([made_up, "Final Answer: 12"], Late)
    [segment] = t.segments
    own = [i for i, m in zip(segment.response_ids, segment.response_mask, strict=True) if m]
    text = BYTES.decode(own)
    assert "13" not in text and text.count("Observation:") == 1
    assert t.turns[0].tool_results[0].content == "12"
    assert t.turns[0].finish_reason == "stop"
    row = BYTES.decode(segment.response_ids)
    assert "Observation:<|im_end|>\n<|im_start|>user\nObservation: 12<|im_end|>" in row


def test_react_reports_a_missing_action_to_the_model():
    t = react(["Thought: hm\nObservation: 13", "Final Answer: 12"])
    assert "no action found" in t.messages[-2].content and t.final_text == "Final Answer: 12"


def test_a_single_stop_text_may_be_a_string():
    @agent_loop("stops_at_end")
    async def stops_at_end(ep):
        await ep.generate(stop="END")

    t = play(
        Sample("s", (ASK,), agent_name="stops_at_end"),
        Scripted(["The Number is 3 END more"], BYTES),
        BYTES,
    )
    assert t.final_text == "The Number is 3 END"


def test_a_loop_that_never_generates_is_an_error():
    @agent_loop("forgets_to_await")
    async def forgets(ep):
        pass

    with pytest.raises(UserCodeError, match="returned without a turn"):
        play(Sample("s", (ASK,), agent_name="forgets_to_await"), Scripted([], BYTES), BYTES)


def generation(ids):
    n = len(ids)
    return Generation(
        token_ids=token_array(ids),
        logprobs=float_array([-float(i) for i in range(n)]),
        versions=token_array(range(n)),
        finish_reason="length",
        prompt_tokens=1,
    )


def test_a_turn_is_cut_after_the_token_that_completes_the_stop():
    tokenizer = family_tokenizer("qwen2_5")
    template = ChatTemplate(tokenizer)
    text = "the value STOP and more STOP"
    ids = tokenizer.encode(text)
    cut, kept = cut_at_stop(generation(ids), template, ["STOP", "more"])
    n = len(cut.token_ids)
    assert kept == "the value STOP"
    assert list(cut.token_ids) == ids[:n] and "STOP" in tokenizer.decode(ids[:n])
    assert "STOP" not in tokenizer.decode(ids[: n - 1])
    assert len(cut.logprobs) == len(cut.versions) == n and cut.finish_reason == "stop"
    whole, kept = cut_at_stop(generation(ids), template, ["never"])
    assert whole.token_ids == generation(ids).token_ids and kept == text


def test_a_stop_text_at_the_very_end_keeps_all_and_stays_a_length_stop():
    ids = BYTES.encode("a STOP")
    cut, kept = cut_at_stop(generation(ids), TEMPLATE, ["STOP"])
    assert list(cut.token_ids) == ids and kept == "a STOP"


# -- half a call ----------------------------------------------------------------------------------


CALL = '<tool_call>\n{"name": "counts_runs", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize("limit", range(1, len(BYTES.encode(CALL)) + 1))
def test_half_a_call_is_never_run(limit):
    ran = Counter()

    @tool(name="counts_runs")
    def counts_runs(x: int) -> int:
        """Count."""
        ran["n"] += 1
        return x

    config = Config.model_validate({"rollout": {"max_turn_tokens": limit}})
    sample = Sample("s", (ASK,), agent_name="tool_agent", tools=("counts_runs",))
    t = play(sample, Scripted([CALL, "done"], BYTES), BYTES, config=config)
    assert t.stop_reason == "turn_tokens" and not ran
    [segment] = t.segments
    assert len(segment.response_ids) == limit == sum(segment.response_mask)
