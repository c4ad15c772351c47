"""The reward `reward_model`: a sequence classifier with one output, trained on preferences.

It runs in this process, on all waiting rollouts in one batch, or on a server (`/classify` of SGLang
or vLLM). In both cases this process makes the tokens, with the reward model's own tokenizer and
chat template.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from agentrl.chat import load_tokenizer
from agentrl.engine.local.load import max_row_length, resolve_device
from agentrl.errors import ConfigError, Infrastructure
from agentrl.http import HttpClient
from agentrl.registry import did_you_mean
from agentrl.rewards import reward
from agentrl.trajectory import Trajectory
from agentrl.workers import Threads

SHOWN = ("conversation", "final_text")
SERVERS = ("sglang", "vllm")


@reward("reward_model")
class RewardModel:
    """Scores rollouts by a reward model. One object serves the whole run."""

    def __init__(
        self,
        path: str,
        url: str = "",
        server: str = "sglang",
        model: str = "",
        show: str = "conversation",
        device: str = "auto",
        batch_tokens: int = 16384,
        token_env: str = "",
        timeout_s: float = 30.0,
    ):
        """Load the tokenizer. The weights are loaded when the first rollout is scored.

        Args:
            path: a folder in transformers' format or a name on the hub. It has weights and
                tokenizer, or with `url` the tokenizer alone.
            url: a server that runs the model; empty: this process runs it.
            server: the kind of server, sglang or vllm.
            model: the model's name on the server (vllm); empty: `path`.
            show: conversation (all of it), or final_text (the prompt and the last answer).
            device: the device in this process: auto, cpu, cuda, cuda:1, ...
            batch_tokens: most tokens of one forward pass.
            token_env: the environment variable with the server's token.
            timeout_s: seconds until the server must answer.

        Raises:
            UserError: there is no such model, or it does not have one output.
        """
        for key, value, choices in (("show", show, SHOWN), ("server", server, SERVERS)):
            if value not in choices:
                raise ConfigError(
                    f"{key}={value!r} is not a choice.{did_you_mean(value, choices)}"
                    f" Choices: {', '.join(choices)}"
                )
        if token_env and token_env not in os.environ:
            raise ConfigError(f"token_env={token_env!r}: there is no such environment variable")
        self._path, self._server, self._show = path, server, show
        self._name = model or path
        self._device, self._batch_tokens = device, batch_tokens
        self._timeout_s = timeout_s
        self._tokenizer = load_tokenizer(path)
        self._control_texts = _control_tokens(self._tokenizer)
        self._max_length = max_row_length(_load_config(path) if url else _load_checked_config(path))
        self._make_client = partial(HttpClient, url, token=os.environ.get(token_env, ""))
        if url:
            self._make_client()  # raises for an invalid URL before the run starts
        self._url = url
        self._client: HttpClient | None = None
        self._model: Any = None
        self._threads: Threads | None = None
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __call__(self, trajectory: Trajectory) -> float:
        """Return the model's output, unchanged.

        Raises:
            Infrastructure: the server is down, or its answer has no score.
        """
        self._enter_loop()
        ids = self.ids(trajectory)
        if self._url:
            return await self._request_score(ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((ids, future))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await future

    def ids(self, trajectory: Trajectory) -> list[int]:
        """Return the tokens that the model scores; if there are too many for it, the last ones.

        The text of a control token gets a space: an answer must not end its own turn and write the
        next turn, which praises the answer.
        """
        messages = [m.as_dict() for m in trajectory.messages]
        if self._show == "final_text":
            messages = [m.as_dict() for m in trajectory.sample.prompt]
            messages.append({"role": "assistant", "content": trajectory.final_text})
        for message in messages:
            for token in self._control_texts:
                spelled = token[0] + " " + token[1:]
                message["content"] = message["content"].replace(token, spelled)
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return self._tokenizer(text, add_special_tokens=False).input_ids[-self._max_length :]

    async def close(self) -> None:
        """Release the weights and the connections. A later call loads them again."""
        if self._client is not None:
            await self._client.aclose()
        if self._threads is not None:
            self._threads.close()
        self._client = self._threads = self._model = self._loop = None

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._waiting, self._serving = loop, [], None
            self._client = self._make_client() if self._url else None
            self._threads = Threads(1, "reward-model")

    async def _serve(self) -> None:
        """Score the waiting rollouts, batch by batch, in order of arrival."""
        assert self._threads is not None
        while self._waiting:
            batch = self._waiting[: self._count_fitting([ids for ids, _ in self._waiting])]
            del self._waiting[: len(batch)]
            live = [(ids, future) for ids, future in batch if not future.done()]
            if not live:
                continue
            work = partial(self._scores, [ids for ids, _ in live])
            scores, error = await (await self._threads.start(work))
            for i, (_, future) in enumerate(live):
                if not future.done():
                    future.set_exception(error) if error else future.set_result(scores[i])

    def _count_fitting(self, rows: Sequence[Sequence[int]]) -> int:
        """Return how many of the first rows fit into a batch; at least one."""
        longest = 0
        for i, row in enumerate(rows):
            longest = max(longest, len(row))
            if i and longest * (i + 1) > self._batch_tokens:
                return i
        return len(rows)

    @torch.inference_mode()
    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        if self._model is None:
            self._model = _load(self._path, resolve_device(self._device))
        pad = self._model.config.pad_token_id
        if pad is None:  # without it the model would read the padding as a row's last token
            return [s for row in rows for s in self._forward([row], 0)]
        return self._forward(rows, pad)

    def _forward(self, rows: Sequence[Sequence[int]], pad: int) -> list[float]:
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])  # (B, T)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        device = self._model.device
        out = self._model(input_ids=ids.to(device), attention_mask=mask.to(device))
        return out.logits[:, 0].float().tolist()

    async def _request_score(self, ids: list[int]) -> float:
        assert self._client is not None
        body: dict[str, Any] = {"input_ids": [ids]}
        if self._server == "vllm":
            body = {"model": self._name, "input": ids, "use_activation": False}
        deadline = time.monotonic() + self._timeout_s
        status, answer = await self._client.request_json(
            "POST", "/classify", body, deadline=deadline, retries=1, wait_if_busy=True
        )
        try:
            values = (
                answer["data"][0]["probs"] if self._server == "vllm" else answer[0]["embedding"]
            )
            [score] = values
        except (TypeError, LookupError, ValueError):
            score = None
        if status != 200 or isinstance(score, bool) or not isinstance(score, (int, float)):
            raise Infrastructure(
                f"{self._url}/classify answered with status {status}: {answer!r:.300}; expected"
                f" {self._server}'s answer with one number"
            )
        return float(score)


def _control_tokens(tokenizer: Any) -> list[str]:
    """Return the texts that the tokenizer reads as tokens of roles and turns, the longest first."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {t.content for t in added if t.special} | {*tokenizer.all_special_tokens}
    return sorted((t for t in texts if len(t) > 1), key=len, reverse=True)


def _load_config(path: str) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as e:
        raise ConfigError(f"no reward model at {path!r}: {str(e).splitlines()[0]}") from e


def _load_checked_config(path: str) -> Any:
    """Return the config of a reward model.

    Raises:
        ConfigError: the model is not a reward model.
    """
    config = _load_config(path)
    architecture = (config.architectures or ["?"])[0]
    if not architecture.endswith("ForSequenceClassification") or config.num_labels != 1:
        raise ConfigError(
            f"{path!r} is a {architecture} with {config.num_labels} outputs. A reward model in this"
            " process must be a ...ForSequenceClassification with one output (num_labels=1). Others"
            " can run on a server: reward.kwargs.url"
        )
    return config


def _load(path: str, device: str) -> Any:
    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as e:
        raise ConfigError(f"cannot load the reward model {path!r}: {e}") from e
    return model.to(device).eval()
