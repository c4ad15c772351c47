"""Environments of verifiers, v0 and v1: the package drives the episode through the gateway."""

from pathlib import Path

import pytest
from support.at_once import play_at_once

from agentrl import load_config
from agentrl.demo import TINY_SETTINGS
from agentrl.errors import DataError, Infrastructure, UserCodeError
from agentrl.preflight import make_plan
from agentrl.record import METRICS, read_metrics
from agentrl.testing import byte_tokenizer, call
from agentrl.trainer import Trainer

TOKENIZER = byte_tokenizer()
FOLDER = Path(__file__).parent / "environments"
V0, V1 = f"verifiers:{FOLDER}/words.py", f"verifiers:{FOLDER}/words_v1.py"
pytestmark = pytest.mark.doors


def rows_of(address):
    return list(make_plan(load_config(None, [], {"data.train": address})).train)


def answer(sample):
    return [f"It is {sample.row + 1}"]


@pytest.mark.proves("verifiers", "rows", "reward")
@pytest.mark.parametrize(("packages", "address"), [("verifiers-v0", V0), ("verifiers", V1)])
def test_the_rubric_gives_the_outcome(use_packages, packages, address):
    use_packages(packages, "verifiers")
    samples = rows_of(f"{address}?n=3")
    assert [s.prompt[-1].content for s in samples] == [f"How long is {'a' * i}?" for i in (1, 2, 3)]
    right = play_at_once(samples, answer, TOKENIZER)
    wrong = play_at_once(samples, ["I do not know"], TOKENIZER)
    assert [t.scores.outcome for t in right + wrong] == [1.0] * 3 + [0.0] * 3
    assert all(len(t.turns) == 1 and t.stop_reason == "done" for t in right)


@pytest.mark.proves("verifiers", "tools")
def test_tools_of_a_classic_environment(use_packages):
    use_packages("verifiers-v0", "verifiers")
    [sample] = rows_of(f"{V0}?n=1&kind=tools&count=1")
    script = [call("length", word="aaaa"), "So it is 1"]
    [played] = play_at_once([sample], script, TOKENIZER)
    assert [m.content for m in played.messages if m.role == "tool"] == ["4"]
    assert played.scores.outcome == 1.0 and len(played.turns) == 2
    assert played.scores.metrics["length_calls"] == 1.0


@pytest.mark.proves("verifiers", "user")
def test_a_user_of_a_classic_environment(use_packages):
    use_packages("verifiers-v0", "verifiers")
    [sample] = rows_of(f"{V0}?n=1&kind=asking&count=1")
    [played] = play_at_once([sample], ["No idea", "Let me think", "It is 1"], TOKENIZER)
    users = [m.content for m in played.messages if m.role == "user"]
    assert users == ["How long is a?", "Are you sure?", "Are you sure?"]
    assert played.scores.outcome == 1.0


def test_an_episode_that_exceeds_its_budget_has_no_reward(use_packages):
    use_packages("verifiers-v0", "verifiers")
    [sample] = rows_of(f"{V0}?n=1&kind=asking&count=1")
    [played] = play_at_once([sample], ["It is 1"] * 3, TOKENIZER, ["rollout.max_turns=2"])
    assert played.stop_reason == "turns" and played.scores.outcome == 0.0


@pytest.mark.parametrize(
    ("packages", "address", "message"),
    [
        ("verifiers", V0, r"words.py cannot be imported.*install verifiers 'verifiers<0.4'"),
        ("verifiers", "verifiers:no-such-env", "no environment 'no-such-env': no module"),
        ("verifiers", f"{V1}?harness=bash", "runs commands of the policy.*runtime=docker"),
        ("verifiers", f"{V1}?counts=3", "no option 'counts'. Options: .*count, harness, runtime"),
        ("verifiers-v0", f"{V0}?kinds=3", "no option 'kinds'. Options: kind, count"),
    ],
)
def test_wrong_environments_are_refused(use_packages, packages, address, message):
    use_packages(packages, "verifiers")
    with pytest.raises(DataError, match=f"(?s){message}"):
        rows_of(address)


def test_a_row_cannot_choose_an_environment(use_packages):
    use_packages("verifiers-v0", "verifiers")
    [sample] = rows_of(f"{V0}?n=1")
    sample.extra["verifiers"]["env"] = "/tmp/other.py"
    with pytest.raises(UserCodeError, match=r"does not name the environment '/tmp/other.py'"):
        play_at_once([sample], ["It is 1"], TOKENIZER)


def test_an_error_of_the_environment_is_no_reward(use_packages, tmp_path):
    use_packages("verifiers-v0", "verifiers")
    text = (FOLDER / "words.py").read_text()
    (tmp_path / "broken.py").write_text(
        text.replace("return [{", 'raise vf.InfraError("the simulator is down")\n        return [{')
    )
    [sample] = rows_of(f"verifiers:{tmp_path}/broken.py?n=1&kind=asking")
    with pytest.raises(Infrastructure, match=r"verifiers: .*simulator is down"):
        play_at_once([sample], ["It is 1"] * 3, TOKENIZER)


def test_a_row_cannot_choose_options(use_packages):
    """An option may be the address of a judge, or the name of a variable with its key."""
    use_packages("verifiers-v0", "verifiers")
    [sample] = rows_of(f"{V0}?n=1&count=1")
    sample.extra["verifiers"]["options"] = {"count": 1, "judge_url": "http://other"}
    with pytest.raises(UserCodeError, match=r"does not name the environment .*other.*It names: "):
        play_at_once([sample], ["It is 1"], TOKENIZER)


@pytest.mark.parametrize(
    "error",
    [
        "openai.APIConnectionError(request=None)",
        "ConnectionRefusedError(111)",
        "RuntimeError('judge') from openai.APITimeoutError(request=None)",
    ],
)
def test_a_judge_that_is_down_is_no_reward(use_packages, tmp_path, error):
    """The rubric of v0 only logs the error, and counts it as 0."""
    use_packages("verifiers-v0", "verifiers")
    text = (FOLDER / "words.py").read_text()
    right = 'return float(completion[-1]["content"].endswith(answer))'
    assert text.count(right) == 1
    judge = f'if "judge" in completion[-1]["content"]: raise {error}\n        {right}'
    (tmp_path / "judged.py").write_text("import openai\n" + text.replace(right, judge))
    [sample] = rows_of(f"verifiers:{tmp_path}/judged.py?n=1")
    with pytest.raises(Infrastructure, match="calling reward function right: "):
        play_at_once([sample], ["judge 1"], TOKENIZER)
    [played] = play_at_once([sample], ["It is 1"], TOKENIZER)
    assert played.scores.outcome == 1.0


def test_an_error_of_a_reward_function_is_the_reward_0_of_the_package(use_packages, tmp_path):
    """Otherwise a policy could have bad episodes dropped."""
    use_packages("verifiers-v0", "verifiers")
    text = (FOLDER / "words.py").read_text()
    (tmp_path / "parsing.py").write_text(text.replace(".endswith(answer)", ".upper(int(answer))"))
    [sample] = rows_of(f"verifiers:{tmp_path}/parsing.py?n=1")
    [played] = play_at_once([sample], ["It is 1"], TOKENIZER)
    assert played.scores.outcome == 0.0


@pytest.mark.proves("verifiers", "200 episodes at once")
@pytest.mark.load
def test_200_episodes_at_once(use_packages):
    use_packages("verifiers-v0", "verifiers")
    samples = rows_of(f"{V0}?n=4&kind=asking") * 50
    played = play_at_once(samples, lambda s: ["Hm", *answer(s), *answer(s)], TOKENIZER)
    assert [t.scores.outcome for t in played] == [1.0] * 200
    assert all(len(t.turns) == 3 for t in played)


@pytest.mark.proves("verifiers", "training")
@pytest.mark.slow
@pytest.mark.parametrize(("packages", "address"), [("verifiers-v0", V0), ("verifiers", V1)])
def test_tiny_trains(use_packages, packages, address, tiny_model, tmp_path):
    use_packages(packages, "verifiers")
    flags = {
        "data.train": address,
        "model.path": str(tiny_model),
        "trainer.output": str(tmp_path / "run"),
    }
    overrides = [
        "data.batch_size=2", "rollout.n=2", "trainer.total_steps=5", "trainer.device=cpu",
        "trainer.save_freq=never", "rollout.max_turns=3", "rollout.max_trajectory_tokens=1024",
    ]  # fmt: skip
    Trainer(load_config(None, overrides, flags, preset=TINY_SETTINGS)).run()
    metrics = [values for _, values in read_metrics(tmp_path / "run" / METRICS)]
    assert len([m for m in metrics if "critic/score/mean" in m]) == 5
