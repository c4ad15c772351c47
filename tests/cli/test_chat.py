"""`agentrl play chat`: the person at the terminal is the user."""

import asyncio
import time
from array import array

import pytest
from typer.testing import CliRunner

from agentrl import registry
from agentrl.chat import ChatTemplate
from agentrl.cli import app
from agentrl.engine.base import Sampling
from agentrl.engine.local import LocalEngine
from agentrl.engine.pieces import SamplerInPieces
from agentrl.interactions.person import Person
from agentrl.trajectory import Generation, Message


@pytest.fixture
def chat(tiny_model):
    def run(text, *options):
        command = [
            "play",
            "chat",
            "--model",
            str(tiny_model),
            "rollout.max_turn_tokens=48",
            *options,
        ]
        # Without the tools of other tests. A file is loaded once, so its tool is kept.
        with registry.tools.isolated(keep=("calculator",) if options else ()):
            result = CliRunner().invoke(app, command, input=text)
        assert result.exception is None, result.exception
        return result.output

    return run


def test_a_conversation_with_a_tool(chat):
    system = ("--system", "Use the tools. Answer with ####.", "--file", "shelf:calculator")
    question = "Zoe has 7 boxes of 9 stamps and 6 break. How many stamps in all?"
    text = chat(f"{question}\nAre you sure?\n", *system)
    assert text.startswith("tools: calculator; sampled at T=1.0")
    assert text.count("assistant> ") >= 2 and "tool> " in text and "user> " not in text
    # A call is shown as the policy writes it, once, before its result.
    first_call, first_result = text.index("<tool_call>"), text.index("tool> ")
    assert text.index("assistant> ") < first_call < first_result
    assert text.count("<tool_call>") == text.count("tool> ")


@pytest.mark.parametrize("text", ["", "/exit\nHi\n", "Hi\n/exit\nHi\n", "Hi\n/reset\n"])
def test_it_ends(chat, text):
    assert chat(text).count("assistant> ") == text.startswith("Hi")


def test_reset_begins_a_new_conversation(chat):
    assert chat("Hi\n/reset\nHi\n").count("assistant> ") == 2


def test_an_answer_that_is_cut_is_shown(chat):
    # At this temperature, the first token hardly ever ends the turn.
    text = chat("Hi\nHi\n", "rollout.max_turn_tokens=1", "rollout.temperature=100")
    assert text.count("assistant> ") == 2
    assert text.count("ended: turn_tokens (the answer was cut: rollout.max_turn_tokens=1)") == 2


SAMPLING = Sampling(temperature=0.0, max_tokens=64)
"""Cut at 64 tokens unless the turn ends."""


@pytest.fixture
def shown(tiny_model):
    """Return a function that samples a turn in pieces: the pieces, and the generation."""
    template = ChatTemplate.load(tiny_model)
    engine = LocalEngine.load(str(tiny_model), template.tokenizer, device="cpu")
    prompt = template.prompt([Message("user", "How much is 7*9 - 6?")])

    def run(sampling=SAMPLING, sampled=None, in_pieces=True, opening=""):
        pieces = []
        source = engine if sampled is None else Scripted([sampled])
        source.begin("a")
        sampler = SamplerInPieces(source, template, lambda *piece: pieces.append(piece))
        sampler = sampler if in_pieces else source
        arguments = {"episode_id": "a", "seed": 3, "deadline": time.monotonic() + 60}
        try:
            row = prompt + template.encode(opening)
            turn = asyncio.run(sampler.generate(row, sampling, **arguments))
        finally:
            source.end("a")
        return pieces, turn, template

    yield run
    engine.close()


def test_a_turn_is_the_same_in_pieces(shown):
    pieces, turn, template = shown()
    _, at_once, _ = shown(in_pieces=False)
    whole = turn.token_ids
    assert whole == at_once.token_ids and turn.finish_reason == at_once.finish_reason
    assert len(whole) == len(turn.logprobs) > 5 and turn.prompt_tokens == at_once.prompt_tokens
    assert "".join(text for text, _ in pieces) == template.decode_turn(whole)
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    # Greedy: limits at and around a piece give the first tokens.
    for limit in (1, 3, 4, 5):
        pieces, cut, _ = shown(Sampling(temperature=0.0, max_tokens=limit))
        assert cut.token_ids == whole[:limit] and cut.finish_reason == "length"
        assert len(pieces) == -(-limit // 4)


def test_a_stop_text_may_begin_in_an_earlier_piece(shown):
    whole = shown()[1].token_ids
    template = shown()[2]
    stop = template.decode(whole[2:6])
    stopped = shown(Sampling(temperature=0.0, max_tokens=64, stop=(stop,)))[1]
    assert len(stopped.token_ids) <= 8 and stop in template.decode(stopped.token_ids)


def test_a_stop_text_of_the_prompt_does_not_end_a_turn(shown):
    stops = Sampling(temperature=0.0, max_tokens=9, stop=("<think>",))
    ids = shown()[2].encode("123456789")
    pieces, turn, _ = shown(stops, sampled=ids, opening="<think>")
    assert turn.token_ids == ids
    assert "".join(text for text, _ in pieces).endswith("<think>\n123456789")


def test_no_piece_lets_an_escape_sequence_through(capsys):
    """A sequence may be split after any of its characters, and so may a line break."""
    text = "a\x1b[2Jb\u202ec\nd"
    for at in range(1, len(text)):
        Person.show_piece(text[:at], False)
        Person.show_piece(text[at:], True)
        assert capsys.readouterr().out == "  assistant> a\\x1b[2Jb\\u202ec\n  d\n"


def test_a_character_of_several_tokens_is_shown_once_it_is_complete(shown):
    """In the tiny model's vocabulary, each byte of this character is a token."""
    template = shown()[2]
    ids = array(
        "i", [*template.encode("123"), *template.encode("\U0001f642"), *template.encode("4")]
    )
    assert len(ids) == 8
    pieces, turn, _ = shown(sampled=ids)
    assert pieces == [("123", False), ("\U0001f6424", True)] and turn.token_ids == ids


class Scripted:
    """Samples given tokens, at most as many as a request wants."""

    max_length, is_concurrent = 512, False

    def __init__(self, turns):
        self.left = [*turns[0]]

    def begin(self, episode_id, *, awaited=True):
        pass

    end = begin

    async def generate(self, prompt_ids, sampling, **kwargs):
        part, self.left = self.left[: sampling.max_tokens], self.left[sampling.max_tokens :]
        reason = "length" if self.left else "stop"
        zeros = array("f", [0.0] * len(part)), array("i", [0] * len(part))
        return Generation(array("i", part), *zeros, reason, len(prompt_ids), 0)


def test_the_same_words_get_another_answer(chat):
    answers = [chat("Hi\n/exit\n", "rollout.temperature=3") for _ in range(4)]
    assert all("assistant> " in a for a in answers) and len(set(answers)) > 1


def test_a_loop_without_an_interaction_is_refused(tiny_model):
    command = ["play", "chat", "--model", str(tiny_model), "--agent", "single_turn"]
    result = CliRunner().invoke(app, command)
    assert "use tool_agent" in str(result.exception)
