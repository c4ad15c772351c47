"""The door benchmark: files in the published formats become rows whose rewards are right."""

import asyncio
import json

import pytest

from agentrl import load_config, play
from agentrl.cli import main
from agentrl.data import write_rows
from agentrl.doors import benchmark, door
from agentrl.errors import ConfigError, DataError, UserError
from agentrl.preflight import make_plan
from agentrl.testing import Scripted, byte_tokenizer, call

pytestmark = pytest.mark.usefixtures("fresh")
TOKENIZER = byte_tokenizer()


@pytest.fixture
def fresh(tmp_path, monkeypatch, own_registries):
    """Keep rows and environments in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(door, "_loaded", set())
    door.rows_file.cache_clear()
    yield
    door.rows_file.cache_clear()


def write_lines(path, *objects):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))


def reward_of(plan, row, *turns):
    """Play a script on a row of a plan, and return its reward."""
    trajectory = play(plan.train[row], Scripted([*turns], TOKENIZER), TOKENIZER)
    return asyncio.run(plan.scorer.score_all([trajectory]))[0].reward


def plan_of(address):
    return make_plan(load_config(None, [], {"data.train": address}))


# -- questions with an answer ---------------------------------------------------------------------


def test_gsm8k(tmp_path):
    question = "Ann has 3 bags of 400 nuts. How many nuts?"
    write_lines(
        tmp_path / "test.jsonl",
        {"question": question, "answer": "3*400=<<3*400=1200>>1,200\n#### 1,200"},
    )
    plan = plan_of("benchmark:gsm8k:test.jsonl")
    [sample] = plan.train
    assert sample.ground_truth == "1200" and sample.prompt[0].content.startswith(question)
    assert reward_of(plan, 0, "3 * 400 is 1,200.\n#### 1,200") == 1.0
    assert reward_of(plan, 0, "#### 12") == reward_of(plan, 0, "1200") == 0.0


MATH = {
    "problem": "What is $1/2 + 1/3$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "It is \\fbox{3} no: $\\boxed{\\frac{5}{6}}$.",
}


@pytest.mark.parametrize("form", ["jsonl", "json", "folder", "parquet"])
def test_math_in_each_form(tmp_path, form):
    if form == "folder":  # as the authors publish it
        for name in ("algebra/1", "geometry/1"):
            (tmp_path / "math" / name).parent.mkdir(parents=True)
            (tmp_path / f"math/{name}.json").write_text(json.dumps(MATH, indent=4))
    elif form == "json":
        (tmp_path / "math").write_text(json.dumps([MATH, MATH], indent=1))
    else:
        write_rows(tmp_path / f"math.{form}", [MATH, MATH])
    plan = plan_of("benchmark:math:" + ("math" if form in ("folder", "json") else f"math.{form}"))
    assert [s.ground_truth for s in plan.train] == ["\\frac{5}{6}"] * 2
    assert plan.train[0].extra == {"level": "Level 1", "type": "Algebra"}
    assert reward_of(plan, 1, "So $\\boxed{\\frac{5}{6}}$") == 1.0
    assert reward_of(plan, 1, "So $\\boxed{\\frac{5}{7}}$") == reward_of(plan, 1, "5/6") == 0.0


def test_hotpotqa_of_its_authors_and_of_hugging_face():
    facts = {"title": ["Oslo"], "sent_id": [0]}
    texts = [["Oslo", ["Oslo is in Norway.", " It is cold."]], ["Rome", ["Rome is in Italy."]]]
    one = {"_id": "5a8b", "question": "Where is Oslo?", "answer": "Norway", "context": texts}
    columns = {"title": [t for t, _ in texts], "sentences": [s for _, s in texts]}
    other = {**one, "context": columns, "supporting_facts": facts}
    bare = {"question": "Is Rome in Italy?", "answer": "yes"}
    with open("dev.json", "w") as file:
        json.dump([one, other, bare], file)
    plan = plan_of("benchmark:hotpotqa:dev.json")
    first, second, third = plan.train
    assert first.prompt == second.prompt and second.extra == {"supporting_facts": facts}
    assert first.prompt[0].content.startswith("Oslo: Oslo is in Norway. It is cold.\n\nRome: Rome")
    assert third.prompt[0].content.startswith("Is Rome in Italy?")
    assert reward_of(plan, 0, "<answer>The Norway</answer>") == 1.0
    assert reward_of(plan, 0, "<answer>Italy</answer>") == reward_of(plan, 0, "Norway") == 0.0
    assert reward_of(plan, 2, "<answer>Yes.</answer>") == 1.0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "gsm8k",
            '{"question": "1", "answer": "#### 1"}\n{"question": "2"}',
            "f, line 2: answer is missing",
        ),
        ("gsm8k", '{"question": "1", "answre": "#### 1"}', "Did you mean 'answre'"),
        ("gsm8k", '{"question": 1, "answer": "#### 1"}', "line 1: question must be of type str"),
        ("gsm8k", '{"question": "1", "answer": "1"}', "line 1: answer does not end with"),
        ("gsm8k", '{"question": "1", "answer": "#### 1"}\n\n[1', "f, line 3: is not JSON"),
        ("gsm8k", '["x"]', "f, item 0: must be an object"),
        ("math", '[{"problem": "p", "solution": "5"}]', "f, item 0: solution has no \\\\boxed"),
        ("math", '{"solution": "\\\\boxed{5}"}', "problem is missing"),
        ("hotpotqa", '{"question": "q", "answer": "a", "context": [1]}', "context must be a list"),
        ("hotpotqa", '{"question": "q", "context": []}', "answer is missing"),
        ("hotpotqa", '{"question": "q", "answer": ""}', "line 1: the answer is empty"),
        (
            "hotpotqa",
            '{"question": "q", "answer": "a", "context": {"title": ["t"], "sentences": []}}',
            "context must be a list",
        ),
        (
            "hotpotqa",
            '{"question": "q", "answer": "a", "context": {"title": 5, "sentences": 6}}',
            "context must be a list",
        ),
        ("gsm8k", "", "f: has no rows"),
        ("gsm8k", "[]", "f: has no rows"),
    ],
)
def test_wrong_fields_are_named(tmp_path, name, text, message):
    (tmp_path / "f").write_text(text)
    with pytest.raises(DataError) as error:
        benchmark.rows(f"benchmark:{name}:f")
    assert message.replace("\\\\", "\\") in str(error.value)


def test_wrong_addresses_are_refused():
    with pytest.raises(DataError, match=r"Did you mean 'gsm8k'\? Names: gsm8k, math"):
        benchmark.rows("benchmark:gsm8:f")
    with pytest.raises(DataError, match="write benchmark:NAME:FILE"):
        benchmark.rows("benchmark:gsm8k")
    with pytest.raises(DataError, match=r"missing\.jsonl: cannot be read"):
        benchmark.rows("benchmark:gsm8k:missing.jsonl")
    with pytest.raises(ConfigError, match="no option n"):
        benchmark.rows("benchmark:gsm8k:f?n=3")
    with pytest.raises(DataError, match=r"tau2 needs \?tools=FILE"):
        benchmark.rows("benchmark:tau2:tasks.json")


# -- tasks with tools -----------------------------------------------------------------------------


def function(name, required, **properties):
    parameters = {"type": "dict", "properties": properties, "required": required}
    return {"name": name, "description": f"{name}.", "parameters": parameters, "response": {}}


FOLDER = {"type": "string", "description": "The folder."}
FUNCTIONS = [
    function("cd", ["folder"], folder=FOLDER),
    function("ls", [], a={"type": "boolean", "default": False}),
    function("tail", ["file_name"], file_name=FOLDER, lines={"type": "integer", "default": 10}),
    function("rm", ["file_name"], file_name=FOLDER),
    function("mean", ["numbers"], numbers={"type": "array", "items": {"type": "float"}}),
]
BFCL = {
    "id": "multi_turn_base_0",
    "question": [
        [{"role": "user", "content": "Go to 'docs' and list all."}],
        [{"role": "user", "content": "Show the end of a.txt."}],
    ],
    "initial_config": {"GorillaFileSystem": {"root": {"docs": {"a.txt": "x"}}}},
    "path": ["GorillaFileSystem.cd"],
    "involved_classes": ["GorillaFileSystem"],
    "excluded_function": ["rm"],
}
CALLS = [["cd('docs')", "ls(a=True)"], ["tail(file_name='a.txt', lines=10)"]]


def write_bfcl(folder, calls=CALLS, **changes):
    name = "BFCL_v4_multi_turn_base.json"
    write_lines(folder / name, {**BFCL, **changes})
    answer = {"id": "multi_turn_base_0", "ground_truth": calls}
    write_lines(folder / "possible_answer" / name, answer)
    write_lines(folder / "multi_turn_func_doc/gorilla_file_system.json", *FUNCTIONS)
    return f"benchmark:bfcl:{name}"


RIGHT = (
    *(call("cd", folder="docs") + call("ls", a=True), "All are listed."),
    *(call("tail", file_name="a.txt"), "That is the end."),
)


@pytest.mark.proves("benchmark", "rows", "tools", "user", "reward")
def test_bfcl(tmp_path):
    plan = plan_of(write_bfcl(tmp_path))
    [sample] = plan.train
    assert sample.id == "multi_turn_base_0" and '"docs":{"a.txt":"x"}' in sample.prompt[0].content
    trajectory = play(sample, Scripted([*RIGHT], TOKENIZER), TOKENIZER)
    assert [m.content for m in trajectory.messages if m.role == "user"] == [
        "Go to 'docs' and list all.",
        "Show the end of a.txt.",
    ]
    assert trajectory.scores and trajectory.scores.outcome == 1.0
    wrong = [
        (call("cd", folder="doc") + call("ls", a=True), *RIGHT[1:]),
        (call("ls", a=True) + call("cd", folder="docs"), *RIGHT[1:]),
        (call("cd", folder="docs") + call("ls"), *RIGHT[1:]),
        (RIGHT[0] + call("ls", a=True), *RIGHT[1:]),
        (*RIGHT[:2], call("tail", file_name="a.txt", lines=9), ""),
        (*RIGHT[:2], "", ""),
        ("Done.", "Done."),
    ]
    assert [reward_of(plan, 0, *turns) for turns in wrong] == [0.0] * len(wrong)
    removed = play(sample, Scripted([call("rm", file_name="a"), "", ""], TOKENIZER), TOKENIZER)
    assert not removed.turns[0].tool_results[0].ok


def test_functions_that_bfcl_adds_in_a_later_turn(tmp_path, caplog):
    """In BFCL's multi_turn_miss_func, a turn without text adds functions."""
    question = [*BFCL["question"], []]
    calls = [["cd('docs')"], [], ["tail(file_name='a.txt')"]]
    plan = plan_of(write_bfcl(tmp_path, calls, question=question, missed_function={"2": ["tail"]}))
    [sample] = plan.train
    tail = call("tail", file_name="a.txt")
    right = call("cd", folder="docs"), "", "I have no function for it.", tail, "The end."
    trajectory = play(sample, Scripted([*right], TOKENIZER), TOKENIZER)
    assert trajectory.scores and trajectory.scores.outcome == 1.0
    last = [m.content for m in trajectory.messages if m.role == "user"][-1]
    assert last.startswith('[{"name":"tail"') and last.endswith("What about now?")
    prompt = TOKENIZER.decode([*trajectory.segments[0].prompt_ids])
    assert '"ls"' in prompt and '"tail"' not in prompt
    calls = [["tail(file_name='a.txt')"], [], []]
    write_bfcl(tmp_path, calls, question=question, missed_function={"2": ["tail"]})
    with pytest.raises(DataError, match="no tasks to play"):  # BFCL v4 has one such row: 49
        benchmark.rows("benchmark:bfcl:BFCL_v4_multi_turn_base.json")
    assert "multi_turn_base_0 is left out: it adds tail after its call" in caplog.text
    early = play(sample, Scripted([tail, "", "", ""], TOKENIZER), TOKENIZER)
    assert early.turns[0].tool_results[0].error == "unknown_tool"
    assert reward_of(plan, 0, right[0], "", tail, "", "") == 0.0


def test_types_of_bfcl_become_those_of_json(tmp_path):
    address = write_bfcl(tmp_path, [["mean(numbers=[1, 2.5])"], []])
    plan = plan_of(address)
    assert reward_of(plan, 0, call("mean", numbers=[1, 2.5]), "", "") == 1.0
    schemas = benchmark._bfcl_functions(tmp_path / "x", "GorillaFileSystem")
    assert schemas["mean"]["parameters"] == {
        "type": "object",
        "properties": {"numbers": {"type": "array", "items": {"type": "number"}}},
        "required": ["numbers"],
    }
    assert benchmark._json_schema({"type": {"type": "any", "description": "x"}}) == {
        "type": {"description": "x"}
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"missed_function": {"1": ["cp"]}}, "missed_function must be lists of messages, and map"),
        ({"missed_function": {"2": ["ls"]}}, "missed_function must be lists of messages, and map"),
        ({"missed_function": {"0": ["ls"]}}, "missed_function must be lists of messages, and map"),
        ({"question": [{"role": "user", "content": "a"}]}, "question and missed_function must be"),
        ({"id": "multi_turn_base_1"}, "has no id 'multi_turn_base_1'"),
        ({"involved_classes": ["MathAPI"]}, "math_api.json with the docs of 'MathAPI'"),
        ({"calls": [["cd('docs')", "rm(file_name='a')"], []]}, "\"rm(file_name='a')\" is no call"),
        ({"calls": [["cd(x='docs')"], []]}, "\"cd(x='docs')\" is no call of ['cd', 'ls'"),
        ({"calls": [["cd(docs)"], []]}, "'cd(docs)' is no call"),
        ({"calls": [["cd('a', 'b')"], []]}, "is no call"),
        ({"calls": [["import os"], []]}, "'import os' is no call"),
        ({"calls": [[]]}, "ground_truth has 1 turns, question has 2"),
    ],
)
def test_what_bfcl_rows_cannot_be_is_named(tmp_path, changes, message):
    address = write_bfcl(tmp_path, **changes)
    with pytest.raises(DataError) as error:
        benchmark.rows(address)
    assert ".json, line 1: " in str(error.value) or "MathAPI" in message
    assert message in str(error.value)


def test_rows_whose_calls_their_tools_refuse_are_left_out(tmp_path, caplog):
    """BFCL v4 has one: multi_turn_base_173 expects a text where its docs have an integer."""
    address = write_bfcl(tmp_path, [["tail(file_name='a', lines='3')"], []])
    with pytest.raises(DataError, match=r"multi_turn_base\.json: has no tasks to play"):
        benchmark.rows(address)
    assert "multi_turn_base_0 is left out: its tool refuses {'name': 'tail'" in caplog.text


def tau2_task(key, actions, **criteria):
    instructions = {
        "reason_for_call": "Cancel R1.",
        "known_info": "You are Ann.",
        "unknown_info": None,
    }
    return {
        "id": key,
        "user_scenario": {"persona": None, "instructions": instructions},
        "evaluation_criteria": {"actions": actions, **criteria},
    }


def action(name, **arguments):
    return {"action_id": "0_0", "name": name, "arguments": arguments, "info": None}


def test_tau2(tmp_path, caplog):
    # as pydantic writes it
    parameter = {
        "$defs": {"Key": {"type": "string", "title": "Key"}},
        "properties": {"r": {"$ref": "#/$defs/Key"}},
        "required": ["r"],
        "type": "object",
    }
    tools = [
        {"type": "function", "function": {"name": n, "description": n, "parameters": parameter}}
        for n in ("get_reservation", "cancel_reservation")
    ]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    (tmp_path / "policy.md").write_text("Cancel what the customer wants.")
    get, cancel = action("get_reservation", r="R1"), action("cancel_reservation", r="R1")
    tasks = [
        tau2_task("0", [get, cancel]),
        tau2_task("1", []),
        tau2_task("2", [{**cancel, "requestor": "user"}]),
        tau2_task("3", [action("fly", r="R1")]),
        tau2_task("4", [{**get, "compare_args": []}]),
    ]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks, indent=2))
    plan = plan_of("benchmark:tau2:tasks.json?tools=tools.json")
    [sample] = plan.train
    assert sample.prompt[0].content == "Cancel what the customer wants."
    assert "reason_for_call: Cancel R1.\n\nknown_info: You are Ann." in sample.prompt[1].content
    text = "4 tasks are left out: 1 (no actions), 2 (actions of the user), 3 (no tool fly), 4 (comp"
    assert text in caplog.text
    right = call("get_reservation", r="R1"), call("cancel_reservation", r="R1"), "Done."
    assert reward_of(plan, 0, *right) == 1.0
    assert reward_of(plan, 0, right[1], "Done.") == reward_of(plan, 0, "Done.") == 0.0
    reference = {"type": "object", "properties": {"r": {"$ref": "#/$defs/Missing"}}}
    tools[0]["function"]["parameters"] = reference
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    with pytest.raises(UserError, match="the schema refers to 'Missing'"):
        benchmark.rows("benchmark:tau2:tasks.json?tools=tools.json")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], "has no tasks to play"),
        ([tau2_task("0", [])], "has no tasks to play"),
        ([{**tau2_task("0", [action("t")]), "user_scenario": {}}], "user_scenario has no instr"),
    ],
)
def test_what_tau2_tasks_cannot_be_is_named(tmp_path, tasks, message):
    parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": "t", "parameters": parameters}}
    (tmp_path / "tools.json").write_text(json.dumps([tool]))
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    address = "benchmark:tau2:tasks.json?tools=tools.json"
    with pytest.raises(DataError, match=r"no policy\.md next to it\. Telecom has none"):
        benchmark.rows(address)
    (tmp_path / "policy.md").write_text("Be kind.")
    with pytest.raises(DataError, match=message):
        benchmark.rows(address)


def test_cheats_earn_nothing(tmp_path, capsys):
    """`check environment` plays the gold calls, and policies that call tools at random."""
    address = write_bfcl(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["check", "environment", address])
    output = capsys.readouterr().out
    assert ended.value.code == 0 and "0 of" in output, output
