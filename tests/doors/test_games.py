"""reasoning-gym and TextArena: rows, scores of the packages, many episodes at once, training."""

import copy
import re
import threading
from dataclasses import replace

import pytest
from support.at_once import play_at_once
from support.killed_door import outcomes_with_a_kill

from agentrl import load_config, play
from agentrl.cli import main
from agentrl.demo import TINY_SETTINGS
from agentrl.errors import DataError, Infrastructure, UserCodeError
from agentrl.preflight import make_plan
from agentrl.record import METRICS, read_metrics
from agentrl.testing import Scripted, byte_tokenizer
from agentrl.trainer import Trainer
from agentrl.workers import child_process

TOKENIZER = byte_tokenizer()
LETTERS = "reasoning-gym:letter_counting?n=3&seed=1&max_words=5"
GUESS = "textarena:GuessTheNumber-v0?n=4"
TURNS = ["rollout.max_turns=20"]


@pytest.fixture
def games(use_packages):
    use_packages("games", "reasoning-gym", "textarena")


def rows_of(address):
    return list(make_plan(load_config(None, [], {"data.train": address})).train)


def play_script(sample, texts, *overrides):
    config = load_config(None, list(overrides))
    return play(sample, Scripted(texts, TOKENIZER), TOKENIZER, config=config)


@pytest.mark.proves("reasoning-gym", "rows")
def test_rows_are_those_of_the_package(games):
    samples = rows_of(LETTERS)
    assert [s.prompt[0].role for s in samples] == ["system"] * 3
    assert all("<answer>" in s.prompt[0].content for s in samples)
    for sample in samples:
        letter, text = re.findall(
            r'letter "(.)" appear in the text: "(.*)"', sample.prompt[1].content
        )[0]
        assert sample.ground_truth == str(text.lower().count(letter)) and len(text.split()) <= 5
    # They repeat, and seeds share no row.
    assert [s.prompt for s in rows_of(LETTERS)] == [s.prompt for s in samples]
    other = rows_of("reasoning-gym:letter_counting?n=3&seed=2&max_words=5")
    assert not {s.prompt[1].content for s in samples} & {s.prompt[1].content for s in other}


@pytest.mark.proves("reasoning-gym", "reward")
def test_the_package_scores(games):
    forms = ["I count. <answer>{}</answer>", "<answer>99</answer>", "{}"]
    played = play_at_once(
        rows_of(LETTERS), lambda s: [forms[s.row].format(s.ground_truth)], TOKENIZER
    )
    assert [t.scores.outcome for t in played] == [1.0, 0.0, 0.0]


def test_questions_that_depend_on_the_number_of_rows_are_scored(games):
    """The questions of acre with 3 rows are not the first ones of those with 6 rows."""
    samples = rows_of("reasoning-gym:acre?n=6")
    played = play_at_once(samples, lambda s: [f"<answer>{s.ground_truth}</answer>"], TOKENIZER)
    assert [t.scores.outcome for t in played] == [1.0] * 6


def test_rows_of_another_version_of_the_package_have_no_reward(games):
    sample = rows_of(LETTERS)[0]
    prompt = sample.prompt[0], replace(sample.prompt[1], content="How many letters has it?")
    with pytest.raises(Infrastructure, match="question 0 of letter_counting is not that"):
        play_script(replace(sample, prompt=prompt), ["<answer>1</answer>"])


def test_a_mixture_has_weights(games):
    parts = [{"path": LETTERS, "weight": 2.0}, "reasoning-gym:basic_arithmetic?n=4"]
    plan = make_plan(load_config(None, [], {"data.train": parts}))
    assert len(plan.train) == 7 and plan.epoch_rows == 10
    assert {s.data_source for s in plan.train} == {
        "reasoning-gym/letter_counting", "reasoning-gym/basic_arithmetic",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "reasoning-gym:letter_count?n=2",
            "no task 'letter_count'. Did you mean letter_counting, ",
        ),
        ("reasoning-gym:letter_counting?n=two", "the option n=two must be of type int"),
        ("reasoning-gym:letter_counting?max_wrds=5", "no option 'max_wrds'. Options: .*max_words"),
        ("reasoning-gym:letter_counting?max_words=x", "max_words=x must be a number, as 15"),
        ("textarena:Mastermnd-v0?n=2", "no game 'Mastermnd-v0'. Did you mean Mastermind-v0, "),
        # Its files need Python 3.12, which reads them and finds that it is a game for two.
        ("textarena:Chess-v0", r"a newer Python than 3\.11.*--python python3.12|players has to"),
        ("textarena:TicTacToe-v0", "The number of players has to be 2"),
        ("textarena:GuessTheNumber-v0?rows=2", "no option rows. Options: n, seed"),
        ("textarena:GuessTheNumber-v0?n=0", "has no rows"),
        ("textarena:GuessTheNumber-v0?n=1&seed=9999999999999999", "Integer exceeds 64-bit range"),
        ("reasoning-gym:letter_counting?n=-1", "has no rows"),
        ("reasoning-gym:letter_counting?n=1e3", "the option n=1e3 must be of type int"),
        ("reasoning-gym:letter_counting?n=1&n=1", "the option n occurs twice"),
        ("reasoning-gym:letter_counting?n=1&max_words=.nan", "max_words must be >= min_words"),
        ("reasoning-gim:leg_counting?n=3", "no file matches .* mean 'reasoning-gym:NAME'"),
    ],
)
def test_wrong_addresses_are_refused(games, address, message):
    with pytest.raises(DataError, match=message):
        rows_of(address)


@pytest.mark.proves("textarena", "rows", "user", "reward")
def test_a_game_is_played_to_its_end(games):
    sample = rows_of(GUESS)[0]
    trajectory = play_script(sample, [f"[{i}]" for i in range(1, 21)], "rollout.max_turns=20")
    assert "guess the number between 1 and 20" in trajectory.messages[1].content
    assert re.match(r"The target number is (higher|lower)", trajectory.messages[3].content)
    assert trajectory.stop_reason == "done"
    won = trajectory.scores.metrics["won"]
    assert won == (trajectory.scores.outcome == 1.0)


@pytest.mark.slow
@pytest.mark.load
@pytest.mark.proves("reasoning-gym", "200 episodes at once")
def test_200_answers_at_once_have_their_own_scores(games):
    samples = rows_of("reasoning-gym:letter_counting?n=20") * 10
    played = play_at_once(
        samples, lambda s: [f"<answer>{s.row % 2 and s.ground_truth}</answer>"], TOKENIZER
    )
    assert [t.scores.outcome for t in played] == [
        float(s.row % 2 or s.ground_truth == "0") for s in samples
    ]


def test_an_invalid_move_ends_a_game_without_a_reward(games):
    trajectory = play_script(rows_of(GUESS)[0], ["[10]", "ten", "ten"])
    assert trajectory.stop_reason == "done" and trajectory.scores.outcome == 0.0


@pytest.mark.slow
@pytest.mark.proves("textarena", "200 episodes at once")
@pytest.mark.load
def test_200_games_at_once_are_those_of_one_after_another(games):
    samples = rows_of("textarena:GuessTheNumber-v0?n=4")
    texts = [f"[{i}]" for i in range(1, 21)]
    alone = {s.row: play_script(s, texts, "rollout.max_turns=20").messages for s in samples}
    played = play_at_once(samples * 50, texts, TOKENIZER, ["rollout.max_turns=20"])
    assert len(played) == 200
    assert all(t.messages == alone[t.sample.row] for t in played)


@pytest.mark.parametrize("address", [LETTERS, "textarena:Mastermind-v0?n=2"])
def test_a_check_finds_no_fault(games, address, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "environment", address, "-n", "2"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and re.search("^0 of (19|20) checks failed", shown, re.M), shown
    if address == LETTERS:
        assert "passed       the gold solution earns the maximum: on 2 rows" in shown


@pytest.mark.proves("reasoning-gym textarena", "training")
@pytest.mark.slow
def test_tiny_trains_on_both(games, tiny_model, tmp_path):
    flags = {
        "data.train": [LETTERS, GUESS],
        "model.path": str(tiny_model),
        "trainer.output": str(tmp_path / "run"),
    }
    overrides = [
        "data.batch_size=4", "rollout.n=2", "trainer.total_steps=5", "trainer.device=cpu",
        "trainer.save_freq=never", "rollout.max_turns=3", "rollout.max_trajectory_tokens=1024",
    ]  # fmt: skip
    Trainer(load_config(None, overrides, flags, preset=TINY_SETTINGS)).run()
    metrics = [values for _, values in read_metrics(tmp_path / "run" / METRICS)]
    assert len([m for m in metrics if "critic/score/mean" in m]) == 5


def test_rows_cannot_name_other_games_and_tasks(games):
    [game, *_], [task, *_] = rows_of(GUESS), rows_of(LETTERS)
    game.tools_kwargs["textarena"]["create_kwargs"]["game"] = "TwentyQuestions-v0"
    with pytest.raises(UserCodeError, match="does not name the game 'TwentyQuestions-v0'"):
        play_script(game, ["[1]"])
    for chosen in ({"task": "composite"}, {"options": {"max_words": 6}}, {"seed": 3}):
        changed = copy.deepcopy(task)
        changed.tools_kwargs["reasoning-gym"]["create_kwargs"].update(chosen)
        with pytest.raises(UserCodeError, match="does not name the task"):
            play_script(changed, ["<answer>1</answer>"])


def test_a_process_that_is_killed_among_200_games_gives_no_reward(games):
    """Each game has the reward of its moves, or none."""
    samples = rows_of("textarena:GuessTheNumber-v0?n=200")
    moves = [f"[{i}]" for i in range(1, 21)]
    own = [t.scores.outcome for t in play_at_once(samples, moves, TOKENIZER, TURNS)]
    killed = threading.Event()

    def answer(prompt, turn):
        if turn == 3 and not killed.is_set():
            killed.set()
            for child in list(child_process._children):
                child.kill()
        return moves[turn]

    results = play_at_once(samples, lambda sample: answer, TOKENIZER, TURNS, keep_errors=True)
    errors = [r for r in results if isinstance(r, Exception)]
    assert killed.is_set() and errors and all(isinstance(e, Infrastructure) for e in errors)
    for result, outcome in zip(results, own, strict=True):
        assert isinstance(result, Exception) or result.scores.outcome == outcome


def test_a_killed_process_of_a_game_is_played_again(games):
    def move(samples, prompt, number):
        return f"[{number + 1}]"

    keys = {"data.train": "textarena:GuessTheNumber-v0?n=2"}
    outcomes, played = outcomes_with_a_kill(keys, move)
    assert len(outcomes) == 4 and all(outcomes) and played > 4


def test_an_answer_whose_scoring_is_killed_is_played_again(games):
    def answer(samples, prompt, number):
        [sample] = [s for s in samples if s.prompt[1].content in prompt]
        return f"<answer>{sample.ground_truth}</answer>"

    outcomes, played = outcomes_with_a_kill({"data.train": LETTERS}, answer)
    assert outcomes == [1.0] * 6 and played >= 6
