"""Images in episodes: rows, tools, interactions and loops, with a scripted policy."""

from __future__ import annotations

import asyncio
from itertools import groupby

import pytest
from PIL import Image as PIL
from support.vision import vision_tokenizer

from agentrl.agent_loops import agent_loop
from agentrl.agent_loops.attempt import Runtime
from agentrl.agent_loops.play import play
from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.engine.scripted import Scripted
from agentrl.errors import ConfigError, RequestRefused, UserCodeError
from agentrl.images import PLACE, Image, ImageError, ImageRule
from agentrl.interactions import Interaction, Reply, interaction
from agentrl.testing import call
from agentrl.tools import LocalToolbox, tool
from agentrl.trajectory import Message, Sample, ToolResult

TOKENIZER = vision_tokenizer()
PLACEHOLDER = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
RULE = ImageRule(PLACEHOLDER, 14, 2, 28 * 28, 64 * 28 * 28)
TEMPLATE = ChatTemplate(TOKENIZER, images=RULE)


def picture(units: int, color="red") -> Image:
    """Return an image of so many tokens."""
    return Image.of(PIL.new("RGB", (28 * units, 28), color))


BROKEN = Image(picture(4).data[:60])


class Policy(Scripted):
    """Records the images of each request; None where the argument is missing."""

    def __init__(self, answers):
        super().__init__(answers, TOKENIZER)
        self.images = []

    async def generate(self, *args, images=None, **options):
        self.images.append(images and [i.tokens for i in images])
        return await super().generate(*args, **options)


def zoom(n: int):
    """Zoom."""
    return BROKEN if n == 0 else ["the part: ", picture(n, "blue")]


class Painter(Interaction):
    async def respond(self, messages):
        return Reply(["and this? ", picture(5, "green")])


async def edits(ep):
    await ep.generate()
    ep.observe(Message.of("user", picture(2), "now?"))
    await ep.generate()
    ep.branch([Message.of("user", picture(3), "in short?")])
    await ep.generate()
    critic = ep.spawn([Message.of("user", picture(4), "right?")])
    await critic.generate()


async def broken(ep):
    await ep.generate()
    ep.observe(Message.of("user", BROKEN))
    await ep.generate()


async def talks(ep):
    await ep.generate()
    await ep.interact()
    await ep.generate()


@pytest.fixture(autouse=True)
def registered(own_registries):
    """Register the names for each test alone: tests of rows list all names that are known."""
    tool(zoom)
    interaction("painter")(Painter)
    agent_loop("edits_images")(edits)
    agent_loop("shows_broken_image")(broken)
    agent_loop("talks_of_images")(talks)


def episode(answers, *prompt, loop="tool_agent", config=None, images=RULE, **fields):
    policy = Policy(answers)
    sample = Sample("s", (Message.of("user", *prompt),), agent_name=loop, row=7, **fields)
    return play(sample, policy, TOKENIZER, config=config, images=images), policy


def runs(segment):
    """Return the length and the mask of each run of placeholders in a row."""
    ids = [*segment.prompt_ids, *segment.response_ids]
    mask = [0] * len(segment.prompt_ids) + segment.response_mask.tolist()
    places = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[0] == PLACEHOLDER)
    return [{m for _, m in found} | {len(found)} for is_image, pairs in places if is_image
            for found in [list(pairs)]]  # fmt: skip


def test_an_image_of_the_row_and_one_of_a_tool_are_in_the_row_and_in_the_requests():
    trajectory, policy = episode(
        [call("zoom", n=3), "done"], "look: ", picture(6), " where?", tools=("zoom",)
    )
    (segment,) = trajectory.segments
    assert policy.images == [[6], [6, 3]]
    assert [i.tokens for i in segment.images] == [6, 3]
    assert runs(segment) == [{0, 6}, {0, 3}]
    assert segment.prompt_ids == TEMPLATE.prompt(
        trajectory.sample.prompt, trajectory_schemas(trajectory)
    )
    (result,) = trajectory.turns[0].tool_results
    assert result == ToolResult(
        f"the part: {PLACE}", images=(picture(3, "blue"),), seconds=result.seconds
    )
    assert trajectory.messages[2].images == (picture(3, "blue"),)


def trajectory_schemas(trajectory):
    return LocalToolbox().schemas(trajectory.sample.tools)


def test_messages_of_a_loop_may_have_images():
    trajectory, policy = episode(["a", "b", "c", "d"], picture(1), loop="edits_images")
    assert policy.images == [[1], [1, 2], [3], [4]]
    assert [[i.tokens for i in s.images] for s in trajectory.segments] == [[1, 2], [3], [4]]
    assert [runs(s) for s in trajectory.segments] == [
        [{0, 1}, {0, 2}],
        [{0, 3}],
        [{0, 4}],
    ]


def test_an_interaction_may_answer_with_an_image():
    trajectory, policy = episode(["a", "b"], "hi", loop="talks_of_images", interaction="painter")
    assert policy.images == [None, [5]]
    assert trajectory.messages[2].content == f"and this? {PLACE}"


def test_without_images_engines_do_not_get_the_argument():
    _, policy = episode(["a"], "hi")
    assert policy.images == [None]


def test_an_unreadable_image_of_a_row_is_an_error_that_names_it():
    with pytest.raises(ImageError, match=r"row 7 \(id 's'\), image 1: an image cannot be decoded"):
        episode(["a"], picture(1), BROKEN)


def test_an_unreadable_image_of_a_tool_is_a_text_for_the_model():
    trajectory, policy = episode([call("zoom", n=0), "done"], "hi", tools=("zoom",))
    (result,) = trajectory.turns[0].tool_results
    assert (result.ok, result.error, result.images) == (False, "tool_error", ())
    assert "unreadable image" in result.content
    assert policy.images == [None, None]
    assert "unreadable image" in TEMPLATE.decode(trajectory.segments[0].response_ids)


def test_an_unreadable_image_of_a_loop_is_a_bug_of_the_loop():
    with pytest.raises(UserCodeError, match="that the agent loop or the interaction added"):
        episode(["a", "b"], "hi", loop="shows_broken_image")


def test_a_sampled_placeholder_ends_the_episode_with_its_turn():
    trajectory, policy = episode(
        [call("zoom", n=1) + "<|image_pad|>", "never"], "hi", tools=("zoom",)
    )
    assert len(policy.requests) == 1
    assert policy.requests[0].sampling.stop_ids[-1] == PLACEHOLDER
    (turn,) = trajectory.turns
    assert (trajectory.stop_reason, turn.finish_reason, turn.tool_results) == ("done", "stop", ())
    assert PLACEHOLDER in trajectory.segments[0].response_ids
    assert trajectory.segments[0].images == ()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("a", "<|image_pad|>"),
        ("a", "<|vision_start|><|image_pad|><|vision_end|>"),
        ("a", "<|video_pad|>"),
    ],
)
def test_sglang_gets_no_text_that_it_takes_for_an_image(answer, text):
    """A real server never answers to the first, and answers the others with errors."""
    config = Config.model_validate({"rollout": {"name": "sglang"}})
    answers = call("zoom", n=2) + answer, "done"
    free, policy = episode(answers, text, tools=("zoom",))
    assert free.stop_reason == "done" and policy.images == [None, [2]]
    with pytest.raises(RequestRefused, match="which SGLang takes for media"):
        episode(answers, text, tools=("zoom",), config=config)
    fine, _ = episode((call("zoom", n=2), "done"), "<|vision_start|>", picture(3),
                      tools=("zoom",), config=config)  # fmt: skip
    assert fine.stop_reason == "done"


def test_a_sampled_video_ends_the_episode_where_sglang_cannot_continue_it():
    for name, turns in (("local", 2), ("sglang", 1)):
        config = Config.model_validate({"rollout": {"name": name}})
        answers = call("zoom", n=2) + "<|video_pad|>", "done"
        trajectory, _ = episode(answers, "hi", tools=("zoom",), config=config)
        assert (len(trajectory.turns), trajectory.stop_reason) == (turns, "done")


def test_budgets_count_the_tokens_of_images():
    def stop_reason(n, limit):
        config = Config.model_validate({"rollout": {"max_trajectory_tokens": limit}})
        answers = [call("zoom", n=n), "done"]
        return episode(answers, "hi", config=config, tools=("zoom",))[0].stop_reason

    free, _ = episode([call("zoom", n=1), "done"], "hi", tools=("zoom",))
    length = len(free.segments[0].response_ids)
    assert stop_reason(1, length) == "done"
    assert stop_reason(9, length + 8) == "done"
    assert stop_reason(9, length + 7) == "trajectory_tokens"


def test_a_model_that_reads_no_images_refuses_them():
    for answers, prompt in ((["a"], [picture(1)]), ([call("zoom", n=1), "a"], ["hi"])):
        with pytest.raises(ConfigError, match="the policy reads none"):
            episode(answers, *prompt, tools=("zoom",), images=None)


@pytest.mark.parametrize(("side", "kept"), [("head", [1, 2]), ("tail", [3, 4]), ("middle", [1, 4])])
def test_a_result_that_is_cut_keeps_the_images_whose_places_it_keeps(side, kept):
    config = Config.model_validate({"tools": {"max_result_tokens": 16, "truncate": side}})
    runtime = Runtime(Policy([]), TEMPLATE, LocalToolbox(), config)
    images = tuple(map(picture, (1, 2, 3, 4)))
    space = {"middle": "x" * 30}.get(side, "x")
    content = f"{PLACE}{space}{PLACE}{'x' * 60}{PLACE}{space}{PLACE}"
    result = runtime.truncate(ToolResult(content, images=images))
    assert "tokens shown" in result.content
    assert result.images == tuple(images[i - 1] for i in kept)
    Message("tool", result.content, images=result.images)


def test_rollouts_that_run_at_once_share_the_pixels():
    async def both():
        image = picture(9, "yellow")
        return await asyncio.gather(*(TEMPLATE.images.prepare(image) for _ in range(4)))

    first, *others = asyncio.run(both())
    assert all(other is first for other in others)
