"""The scripted engine: texts in, the tokens a model would have said out."""

from __future__ import annotations

import asyncio
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl.engine.base import Sampler, Sampling
from agentrl.engine.scripted import Scripted
from agentrl.errors import UserError
from agentrl.trajectory import Generation

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
core = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
core.decoder = decoders.ByteLevel()
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=core)
TOKENIZER.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|other|>"]})
END, OTHER = 256, 257


def say(engine: Sampler, prompt: str, *, episode_id: str = "e", **sampling) -> Generation:
    ids = array("i", TOKENIZER.encode(prompt))
    wanted = Sampling(**{"stop_ids": (END, OTHER), **sampling})
    return asyncio.run(
        engine.generate(ids, wanted, episode_id=episode_id, seed=0, deadline=float("inf"))
    )


def read(generation: Generation) -> str:
    return TOKENIZER.decode(list(generation.token_ids))


def test_a_turn_is_its_text_and_the_end_of_turn():
    engine = Scripted(["hi", "bye"], TOKENIZER)
    first, second = say(engine, "Hello"), say(engine, "Hello?")
    assert [read(first), read(second)] == ["hi<|end|>", "bye<|end|>"]
    assert first.finish_reason == second.finish_reason == "stop"
    assert list(first.logprobs) == [0.0] * 3 and list(first.versions) == [0] * 3
    assert first.prompt_tokens == 5
    assert read(say(engine, "Hello", episode_id="another")) == "hi<|end|>"


def test_what_ends_a_turn():
    engine = Scripted(lambda prompt, turn: prompt, TOKENIZER)
    generation = say(engine, "Action: x\nObservation: 3", stop=("Observation:",))
    assert (read(generation), generation.finish_reason) == ("Action: x\nObservation:", "stop")
    generation = say(engine, "one<|other|>two")
    assert (read(generation), generation.finish_reason) == ("one<|other|>", "stop")
    generation = say(engine, "12345", max_tokens=5)
    assert (read(generation), generation.finish_reason) == ("12345", "length")
    generation = say(engine, "12345", max_tokens=6)
    assert (read(generation), generation.finish_reason) == ("12345<|end|>", "stop")
    generation = say(engine, "12345", stop_ids=())
    assert (read(generation), generation.finish_reason) == ("12345", "stop")


def test_answers_by_episode_question_or_function():
    engine = Scripted({"e7": ["seven"], "3*4": ["12", "really"], "": ["?"]}, TOKENIZER)
    assert read(say(engine, "What is 3*4?", episode_id="e7")) == "seven<|end|>"
    assert read(say(engine, "What is 3*4?", episode_id="a")) == "12<|end|>"
    assert read(say(engine, "What is 3*4? 12 Sure?", episode_id="a")) == "really<|end|>"
    assert read(say(engine, "What is 5?", episode_id="b")) == "?<|end|>"
    engine = Scripted(lambda prompt, turn: f"{turn}:{prompt[::-1]}", TOKENIZER)
    assert [read(say(engine, p)) for p in ("ab", "cd")] == ["0:ba<|end|>", "1:dc<|end|>"]


def test_a_script_that_is_too_short_is_an_error():
    engine = Scripted(["hi"], TOKENIZER)
    say(engine, "Hello")
    with pytest.raises(UserError, match=r"1 answer for episode 'e', which requested turn 2"):
        say(engine, "Hello")
    with pytest.raises(UserError, match=r"no answers for episode 'e'.*Keys: '3\*4'.*'Hello'"):
        say(Scripted({"3*4": ["12"]}, TOKENIZER), "Hello")


def test_requests_and_episodes_are_recorded():
    engine = Scripted(["hi", "bye"], TOKENIZER, max_length=99)
    engine.begin("a")
    engine.begin("b")
    assert engine.playing == {"a", "b"}
    prompt = array("i", [1, 2])
    for _ in range(2):
        asyncio.run(engine.generate(prompt, Sampling(), episode_id="a", seed=0, deadline=0.0))
        prompt.append(3)  # a request keeps what it was asked, not the episode's growing row
    engine.end("a")
    engine.end("a")
    assert [(r.episode_id, r.turn, list(r.prompt_ids)) for r in engine.requests] == [
        ("a", 0, [1, 2]),
        ("a", 1, [1, 2, 3]),
    ]
    assert engine.playing == {"b"} and engine.max_length == 99


@given(text=st.text(max_size=20), limit=st.integers(1, 30), stop=st.text(min_size=1, max_size=3))
def test_a_turn_is_a_prefix_that_ends_at_its_first_stop(text: str, limit: int, stop: str):
    generation = say(Scripted([text], TOKENIZER), "?", max_tokens=limit, stop=(stop,))
    whole = [*TOKENIZER.encode(text, add_special_tokens=False), END]
    ids = list(generation.token_ids)
    assert 0 < len(ids) <= limit and ids == whole[: len(ids)]
    assert stop not in TOKENIZER.decode(ids[:-1])
    ended = ids[-1] == END or stop in TOKENIZER.decode(ids)
    assert generation.finish_reason == ("stop" if ended else "length")
