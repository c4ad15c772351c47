"""Recipes: the table is that of the results, no validation row has a twin, rewards are right."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from agentrl import Message, Sample, play, registry
from agentrl.data import load_samples, read_rows
from agentrl.testing import Scripted, byte_tokenizer, call

RECIPES = Path(__file__).parents[2] / "recipes"


def test_the_table_is_that_of_the_results(tmp_path):
    folder = tmp_path / "recipes"
    shutil.copytree(RECIPES, folder)
    subprocess.run([sys.executable, folder / "table.py"], check=True)
    page = (folder / "README.md").read_text()
    assert page == (RECIPES / "README.md").read_text() and "| facts | h100 | seed1 | 40 |" in page


def test_facts_have_no_twins():
    def pairs(name: str) -> set[tuple]:
        samples = load_samples(str(RECIPES / f"facts/{name}.jsonl"))
        texts = [s.prompt[-1].content for s in samples]
        found = [("*" in text, *sorted(map(int, re.findall(r"\d+", text)))) for text in texts]
        for (is_product, a, b), sample in zip(found, samples, strict=True):
            assert sample.ground_truth == str(a * b if is_product else a + b)
        return set(found)

    train, val = pairs("train"), pairs("val")
    assert len(val) == 200 and not train & val


def test_the_rewards_of_facts(own_registries):
    registry.load_file(str(RECIPES / "facts/env.py"))
    number, permuted = (registry.rewards.get(n) for n in ("number", "number_permuted"))
    sample = SimpleNamespace(ground_truth="12")
    texts = ["12", "It is 12.", "12 or 13", "", "I add 7 and 5: 12", "1,2", "twelve", "120"]
    texts += ["-12", "3.12", "12.5", "7 + 5 = 12.\n"]
    played = [SimpleNamespace(final_text=text, sample=sample) for text in texts]
    right = [number(t) for t in played]
    assert right == [1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1]
    scores = permuted(played)
    assert [s["right"] for s in scores] == right
    assert sorted(s["score"] for s in scores) == sorted(right)
    assert [s["score"] for s in scores] != right


def write_again(recipe, folder):
    """Write the rows of a recipe again, and check that they are those of the checkout."""
    runpy.run_path(str(RECIPES / recipe / "rows.py"))["write"](folder)
    for file in (RECIPES / recipe).glob("*.jsonl"):
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_calculator_has_no_twins(tmp_path, own_registries):
    write_again("calculator", tmp_path)
    calculator = registry.load_file("shelf:calculator").calculator
    names = ("train", "val", "chats", "answers")
    train, val, chats, answers = (list(read_rows(tmp_path / f"{name}.jsonl")) for name in names)

    def question(row):
        return row["alone"][-1]["content"]

    rows = [*train, *val, *chats]
    assert all(row["prompt"][-1]["content"] == question(row) for row in rows)
    numbers = {tuple(sorted(re.findall(r"[0-9]+", question(row)))) for row in rows}
    assert len(val) == 200 and len(numbers) == len(rows)
    for chat, answer in zip(chats, answers, strict=True):
        *calls, final = (m["content"] for m in chat["messages"])
        for asked, value in zip(calls[::2], calls[1::2], strict=True):
            arguments = json.loads(asked.splitlines()[1])["arguments"]
            assert value == calculator(**arguments)
        assert value == chat["ground_truth"] and final == f"The answer is {value}."
        assert question(chat) == question(answer) and answer["answer"] == final


def test_the_reward_of_the_calculator(own_registries):
    registry.load_file(str(RECIPES / "calculator/env.py"))
    texts = [
        "The answer is 12.",
        " The answer is 12.\n",
        "The answer is -12.",
        "12",
        "",
        "returns 12",
    ]
    played = [
        SimpleNamespace(final_text=text, sample=SimpleNamespace(ground_truth="12"))
        for text in texts
    ]
    assert [registry.rewards.get("answer")(t) for t in played] == [1, 1, 0, 0, 0, 0]


def test_the_teacher_has_no_twins(tmp_path, own_registries):
    write_again("teacher", tmp_path)

    def pairs(name):
        samples = load_samples(str(tmp_path / f"{name}.jsonl"))
        found = [tuple(map(int, re.findall(r"[0-9]+", s.prompt[-1].content))) for s in samples]
        for (a, b), sample in zip(found, samples, strict=True):
            assert sample.ground_truth == str(a * b)
            assert sample.interaction_kwargs == {"a": a, "b": b}
        return {tuple(sorted(pair)) for pair in found}

    train, val = pairs("train"), pairs("val")
    assert (len(train), len(val)) == (267, 200) and not train & val
    for chat in read_rows(tmp_path / "chats.jsonl"):
        question, *_, answer = (m["content"] for m in chat["messages"])
        a, b = map(int, re.findall(r"[0-9]+", question))
        assert (min(a, b), max(a, b)) in train and answer == str(a * b)
        assert [m.get("train", True) for m in chat["messages"][1:-2]] in ([], [False])


def test_the_teacher_gives_a_hint_once(own_registries):
    registry.load_file(str(RECIPES / "teacher/env.py"))
    reward = registry.rewards.get("right")

    def play(*texts, **kwargs):
        teacher = registry.interactions.get("teacher")(a=7, b=23, **kwargs)
        answers = [Message("assistant", text) for text in texts]
        replies = [asyncio.run(teacher.respond([answer])) for answer in answers]
        assert replies[-1] is None and all(not reply.done for reply in replies[:-1])
        sample = SimpleNamespace(ground_truth="161")
        return replies[0], reward(SimpleNamespace(answers=answers, sample=sample))

    hint, scores = play("It is 160.", "23 * 7 = 161.")
    assert hint.content == "That is wrong. 20 * 7 = 140 and 3 * 7 = 21. 140 + 21 ="
    assert scores == {"score": 1, "first": 0}
    assert play("161") == (None, {"score": 1, "first": 1})
    assert play("I do not know", "140 + 21")[1] == {"score": 0, "first": 0}
    no_hint, scores = play("160", "161", hint=False)
    assert no_hint.content == "That is wrong. Try again." and scores == {"score": 1, "first": 0}
    # The time of an episode may be over before its first turn.
    without_turns = SimpleNamespace(answers=(), sample=SimpleNamespace(ground_truth="161"))
    assert reward(without_turns) == {"score": 0, "first": 0}


def test_an_evaluation_is_a_line_of_the_table(tmp_path):
    table = runpy.run_path(str(RECIPES / "table.py"))
    scores = {"val/reward/mean@1": 0.0, "val_greedy/reward/mean@1": 0.5, "val/reward/pass@2": 1}
    metrics = scores | {"val/rows": 200, "val_greedy/rows": 200}
    (tmp_path / "metrics.json").write_text(json.dumps(metrics))
    file = tmp_path / "calculator/results/h100/base.jsonl"
    table["add"](tmp_path, file)
    kept = {key: value for key, value in metrics.items() if key != "val/reward/pass@2"}
    assert json.loads(file.read_text()) == {"step": 0, "data": kept}
    row = "| calculator | h100 | base | 0 | 0.000 [0.00, 0.02] | 0.500 [0.43, 0.57] |  |"
    assert table["table_row"](file) == row


def rows_of(recipe, *names):
    return [list(read_rows(RECIPES / recipe / f"{name}.jsonl")) for name in names]


def test_the_mixture_has_no_twins():
    rows = runpy.run_path(str(RECIPES / "mix/rows.py"))
    tasks, [val, imitated] = rows["TASKS"], rows_of("mix", "val", "answers")
    assert len(val) == 240
    imitated = [imitated[24 * i : 24 * i + 24] for i in range(3)]
    for task, answers in zip(tasks, imitated, strict=True):
        [train] = rows_of("mix", task)
        held_out = [row for row in val if row["data_source"] == task]
        texts = [(row["prompt"], row["ground_truth"]) for row in [*train, *held_out]]
        texts += [(row["prompt"], row["answer"]) for row in answers]
        assert (len(train), len(held_out), len(answers)) == (300, 80, 24)
        assert len({rows["find_key"](task, *text) for text in texts}) == len(texts)
    for row in [*rows_of("mix", "chain_sum")[0], *val]:
        if row["data_source"] == "chain_sum":
            [(a, sign, b)] = re.findall(r"(\d+) ([+-]) (\d+) =$", row["prompt"])
            assert int(row["ground_truth"]) == int(a) + int(sign + b)
        if row["data_source"] == "letter_counting":
            letter, word = re.findall(r'"(\w+)"', row["prompt"])
            assert int(row["ground_truth"]) == word.lower().count(letter)


def test_the_last_word_is_the_answer(own_registries):
    registry.load_file(str(RECIPES / "mix/env.py"))
    reward, permuted = (registry.rewards.get(n) for n in ("last_word", "last_word_permuted"))

    def score(text, truth):
        sample = SimpleNamespace(ground_truth=truth)
        return reward(SimpleNamespace(final_text=text, sample=sample))

    files = "chain_sum", "needle_haystack", "letter_counting", "val"
    for row in (row for rows in rows_of("mix", *files) for row in rows):
        assert score(f"It is {row['ground_truth']}.", row["ground_truth"])
    names = ["Jean-Pierre", "Pierre", "Jean-", "Rhys-Pierre"]
    assert [score(name, "Jean-Pierre") for name in names] == [1, 0, 0, 0]
    texts = ["Brett", "It is brett.", "Brett treasures singing.", "Brett, Peirce", "", "brettish"]
    assert [score(text, "Brett") for text in texts] == [1, 1, 0, 0, 0, 0]
    assert [score(text, "-69") for text in ("30 - 99 = -69", "69", "-69.", "- 69")] == [1, 0, 1, 0]
    sample = SimpleNamespace(ground_truth="Brett")
    played = [SimpleNamespace(final_text=text, sample=sample) for text in texts]
    scores = permuted(played)
    assert [s["right"] for s in scores] == [1, 1, 0, 0, 0, 0]
    assert sorted(s["score"] for s in scores) == [0, 0, 0, 0, 1, 1]


def test_two_searches_find_the_answer(own_registries):
    """No person of a validation row, and no teacher, is one of a training row or a conversation."""
    registry.load_file(str(RECIPES / "search/env.py"))
    search = registry.load_file("shelf:search").search
    train, val, chats = rows_of("search", "train", "val", "chats")
    people = []
    for rows in (train, val, chats):
        people.append(set())
        for row in rows:
            path = re.findall(r"(?:does|of) (\w+ \w+) live", row["prompt"][-1]["content"])
            if row["data_source"] == "two":
                path += re.findall(r"was (.*)\.", search(path[0], 1))
            passages = [search(name, 1) for name in path]
            towns = re.findall(r"lives in (\w+)\.", "\n".join(passages))
            assert towns[-1] == row["ground_truth"] and towns[:-1] != [row["ground_truth"]]
            people[-1] |= {*path}
            if "messages" in row:
                results = [m["content"] for m in row["messages"] if m["role"] == "tool"]
                assert results == passages and row["messages"][-1]["content"] == towns[-1]
    assert [len(circle) for circle in people] == [240, 200, 40]
    assert len(set.union(*people)) == 480


def test_the_turn_with_the_right_call_is_rewarded_once(own_registries):
    registry.load_file("shelf:calculator")
    registry.load_file(str(RECIPES / "estimators/env.py"))
    sample = Sample(
        "row-0", (Message("user", "2*3+4?"),), "right_call", ground_truth="10",
        tools=("calculator",),
    )  # fmt: skip
    calls = [call("calculator", expression=text) for text in ("2*3", "6+4", "5+5")]
    tokenizer = byte_tokenizer()
    episode = play(sample, Scripted([*calls, "The answer is 10."], tokenizer), tokenizer)
    assert [turn.rewards.get("turn", 0.0) for turn in episode.turns] == [0.0, 1.0, 0.0, 0.0]
    assert registry.rewards.get("right_answer")(episode) == {"score": 1.0, "right": 1.0}


# --- stored runs ---------------------------------------------------------------------------------

STORED = RECIPES / "facts/results/two_cores/ten_steps"


@pytest.fixture
def check(smollm2, own_registries, monkeypatch):
    """The function of recipes/check.py that returns what is wrong in a stored run."""
    monkeypatch.chdir(RECIPES.parent)
    return runpy.run_path(str(RECIPES / "check.py"))["check"]


def stored_runs() -> list[Path]:
    return [file.parent for file in RECIPES.glob("*/results/*/*/config.yaml")]


@pytest.mark.parametrize("all_runs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stored_runs_follow_from_their_tokens(check, all_runs):
    assert STORED in stored_runs()
    for folder in stored_runs() if all_runs else [STORED]:
        assert check(folder, weights=False) == []
        assert sum(file.stat().st_size for file in folder.rglob("*.*")) < 1_000_000


def flip_first(values):
    return [[1 - values[0][0], *values[0][1:]], *values[1:]]


EDITS = {
    "reward": (lambda reward: 1 - reward, "outcome and reward of train-0-", "advantages of step 1"),
    "response_mask": (flip_first, "the mask of train-0-", "advantages of step 1"),
    "versions": (lambda versions: [[-1, *versions[0][1:]]], "the mask of train-0-"),
    "response_ids": (lambda ids: [[ids[0][0] + 1, *ids[0][1:]]], "a turn of train-0-"),
}


@pytest.mark.parametrize("column", EDITS)
def test_a_changed_value_of_a_stored_run_is_named(check, tmp_path, column):
    change, *expected = EDITS[column]
    other_steps = shutil.ignore_patterns("*-000000[01][02-9].parquet")
    folder = Path(shutil.copytree(STORED, tmp_path / "run", ignore=other_steps))
    file = folder / "trajectories/train-00000001.parquet"
    table = pq.read_table(file)
    values = table[column].to_pylist()
    values[0] = change(values[0])
    index = table.schema.get_field_index(column)
    array = pa.array(values, table.schema.field(column).type)
    pq.write_table(table.set_column(index, column, array), file)
    wrong = [text.partition(f"{folder}: ")[2] for text in check(folder, weights=False)]
    assert [any(text.startswith(part) for text in wrong) for part in expected] == [True] * len(
        expected
    ), wrong
    assert len(wrong) == len(expected)


def test_a_change_of_weights_is_told_from_one_of_the_same_norm():
    check = runpy.run_path(str(RECIPES / "check.py"))
    fingerprint, wrong_changes = check["fingerprint"], check["wrong_changes"]
    before = {"a": torch.zeros(3, 4), "b": torch.zeros(5)}
    after = {"a": torch.full((3, 4), 0.5), "b": torch.ones(5)}
    stored = fingerprint(before, after)
    assert stored["a"][0] == pytest.approx(12**0.5 / 2, rel=1e-5)
    directions = np.random.RandomState(0)
    products = [directions.standard_normal(12).sum() / 2, directions.standard_normal(5).sum()]
    assert [stored["a"][1], stored["b"][1]] == pytest.approx(products, rel=1e-5)
    near = {name: tensor * 1.001 for name, tensor in after.items()}
    assert not [*wrong_changes(stored, fingerprint(before, near))]
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0])
    flipped = fingerprint(before, after | {"b": after["b"] * signs})
    assert flipped["b"][0] == stored["b"][0]
    assert [text[:15] for text in wrong_changes(stored, flipped)] == ["the change of b"]
    assert [*wrong_changes(stored, {"a": stored["a"]})] == ["the tensors differ: ['b']"]
