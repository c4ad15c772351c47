"""Parsing SGLang's responses without a server: turns, spans of versions, refusals, errors."""

import copy
import math
from array import array

import pytest
from support.fake_sglang import FakeSGLang

from agentrl.engine.remote.admin import refusal
from agentrl.engine.remote.client import PolicyVersion
from agentrl.engine.remote.sglang import SGLangEngine, read_generation, read_scores, restore_ties
from agentrl.errors import (
    EngineError,
    EngineOverloaded,
    InvalidEngineResponse,
    PromptTooLong,
    RequestRefused,
)

ANSWER = {
    "text": "is never read",
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 9},
        "prompt_tokens": 5,
        "cached_tokens": 4,
        "completion_tokens": 3,
        "weight_version": "7",
        "output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, None], [0.0, 9, None]],
    },
}


def answer(**changes):
    changed = copy.deepcopy(ANSWER)
    changed["meta_info"] |= changes
    return changed


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def test_a_turn():
    generation = read_generation(ANSWER, 3, PolicyVersion("7", 7), "here")
    assert generation.token_ids == array("i", [3, 4, 9])
    assert generation.logprobs == array("f", [-0.5, -0.25, 0.0])
    assert generation.versions == array("i", [7, 7, 7])
    assert (generation.finish_reason, generation.prompt_tokens, generation.cached_tokens) == (
        "stop",
        5,
        4,
    )


def test_versions_by_token_if_the_server_reports_them():
    spans = answer(weight_versions=[span("6", 0, 2), span("7", 2, 3)])
    assert read_generation(spans, 3, PolicyVersion("6", 6), "here").versions == array(
        "i", [6, 6, 7]
    )


def test_versions_are_never_guessed():
    with pytest.raises(EngineError, match=r"weights were '6' when .* and '7' when it ended"):
        read_generation(ANSWER, 3, PolicyVersion("6", 6), "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"output_token_logprobs": [[float("nan"), 3, None]] * 3},
        {"output_token_logprobs": [[None, 3, None]] * 3},
        {"output_token_logprobs": [[float("-inf"), 3, None]] * 3},
        {"output_token_logprobs": [[-0.5, 2**40, None]] * 3},
        {"output_token_logprobs": [[-0.5, "3", None]] * 3},
        {"output_token_logprobs": [[-0.5]] * 3},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [], "completion_tokens": 0},
        {"completion_tokens": 4},
        {"output_token_logprobs": [[-0.5, 3, None]] * 4, "completion_tokens": 4},
        {"finish_reason": {"type": "tool_calls"}},
        {"finish_reason": None},
        {"prompt_tokens": None},
        {"weight_version": None},
        {"weight_versions": [span("7", 0, 2)]},
        {"weight_versions": [span("6", 0, 1), span("7", 2, 3)]},
    ],
)
def test_malformed_answers_are_refused(changes):
    with pytest.raises(InvalidEngineResponse, match="here: not a valid answer of SGLang"):
        read_generation(answer(**changes), 3, PolicyVersion("7", 7), "here")


@pytest.mark.parametrize(
    ("ids", "logprob", "top_k", "top_p", "kept", "restored"),
    [
        ([7, 8, 3], 0.2 / 0.8, 2, 1.0, [7, 3], 0.2 / 0.6),  # 8 and 3 are equally likely
        ([7, 8, 3], 0.2 / 0.8, -1, 0.5, [7, 3], 0.2 / 0.6),
        ([7, 8, 3], 0.2 / 0.8, 3, 0.6, [7, 8, 3], 0.2 / 0.8),  # as many as were kept
        ([7, 8, 3], 0.2 / 0.8, -1, 0.6 - 1e-6, [7, 8, 3], 0.2 / 0.8),  # rounding of the sums
        ([3], 1.0, -1, 1e-6, [3], 1.0),
        ([5, 3, 8], 0.2 / 0.8, 3, 0.5, [5, 3, 8], 0.2 / 0.8),  # it was found among the others
    ],
)
def test_the_token_too_many_of_equally_likely_ones(ids, logprob, top_k, top_p, kept, restored):
    """Token 3 was sampled, of probability 0.2; 0.4 and 0.2 are before it."""
    meta = {
        "output_token_logprobs": [[math.log(0.2), 3, None]],
        "output_token_sampling_mask": [ids],
        "output_token_sampling_logprobs": [math.log(logprob)],
    }
    restore_ties(meta, top_k, top_p)
    assert meta["output_token_sampling_mask"] == [kept]
    assert meta["output_token_sampling_logprobs"] == pytest.approx([math.log(restored)], abs=1e-12)


@pytest.mark.parametrize("nonsense", [None, [], "text", {}, {"meta_info": None}])
def test_another_servers_answer(nonsense):
    with pytest.raises(InvalidEngineResponse):
        read_generation(nonsense, 3, PolicyVersion("7", 7), "here")
    with pytest.raises(InvalidEngineResponse):
        read_scores(nonsense, [1], 10, "here")


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (503, {"detail": "The request queue is full."}, EngineOverloaded),
        (429, None, EngineOverloaded),
        (
            400,
            {"error": {"message": "The input is longer than the model's context length"}},
            PromptTooLong,
        ),
        (400, {"error": {"message": "temperature must be non-negative"}}, RequestRefused),
        (401, {"error": "Unauthorized"}, EngineError),
        (500, "not an object", EngineError),
    ],
)
def test_refusals_have_types(status, body, kind):
    error = refusal(status, body, "here")
    assert type(error) is kind and f"status {status}" in str(error)


def test_a_turn_that_the_server_ends_for_a_reason_of_its_own_is_an_error():
    reason = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    with pytest.raises(EngineOverloaded, match="queue is full"):
        read_generation(answer(finish_reason=reason), 3, PolicyVersion("7", 7), "here")


def test_an_aborted_turn_has_the_tokens_so_far():
    reason = {"type": "abort", "message": "Aborted", "status_code": None}
    part = read_generation(answer(finish_reason=reason), 9, PolicyVersion("7", 7), "here")
    assert part.finish_reason == "abort"
    assert (part.token_ids, part.versions) == (array("i", [3, 4, 9]), array("i", [7, 7, 7]))
    queued = {"meta_info": {"finish_reason": {"type": "abort", "message": "Abort in queue"}}}
    nothing = read_generation(queued, 9, PolicyVersion("7", 7), "here")
    assert (nothing.finish_reason, nothing.token_ids) == ("abort", array("i"))


def test_scores():
    scores = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-0.5, 6, None]]}}
    assert read_scores(scores, [5, 6], 10, "here") == array("f", [0.0, -0.5])
    with pytest.raises(InvalidEngineResponse, match="another row"):
        read_scores(scores, [5, 7], 10, "here")


def test_scores_of_the_vocabularys_last_token():
    """SGLang repeats it as token 0."""
    scores = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-0.5, 0, None]]}}
    assert read_scores(scores, [5, 9], 10, "here") == array("f", [0.0, -0.5])
    with pytest.raises(InvalidEngineResponse, match="another row"):
        read_scores(scores, [5, 8], 10, "here")


class OneToken(FakeSGLang):
    """A server that samples one token for each request, from weights of a version."""

    version = "default"

    def handle(self, host, path, body):
        if path != "/generate":
            return 200, {"max_req_input_len": 512, "weight_version": self.version}
        one = {"completion_tokens": 1, "output_token_logprobs": [[-0.5, 3, None]]}
        return 200, answer(**one, weight_version=self.version)


def test_a_restarted_server_does_not_take_a_version_without_weights():
    server = OneToken()
    try:
        engine = SGLangEngine(server.url(), vocabulary=10)
        engine.set_version(3)
        assert engine.version == 3 and [*engine.probe().versions] == [3]
        server.version = "of another process"
        with pytest.raises(EngineError, match="'default' when this turn began and 'of another"):
            engine.set_version(4)
    finally:
        server.close()
