"""Score the rows of a step by the teachers of the run.

A teacher reads the sampled and the observed tokens of a row as they are, and gives the logprob of
each sampled one. Only its prompt may be another (`teacher.prompt`).
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentrl.chat import ChatTemplate
from agentrl.config import Config
from agentrl.config.teacher import POLICY, TeacherConfig, is_url
from agentrl.engine.local.load import load_model_config, max_row_length, reads_images
from agentrl.engine.remote.admin import AdminClient
from agentrl.engine.remote.sglang import SGLangEngine
from agentrl.errors import ConfigError, EngineError, RequestRefused, RunStopped
from agentrl.learner.batch import Batch, TokenRows, check_logprobs
from agentrl.learner.learner import Learner
from agentrl.preflight.prompts import opening_of
from agentrl.preflight.teacher import check_same_tokens, teacher_messages
from agentrl.tools import LocalToolbox
from agentrl.trajectory import Group, token_array
from agentrl.workers.loops import run_all

TOKEN = "AGENTRL_TEACHER_TOKEN"
"""The environment variable with the API key of teachers that are servers."""
PAUSES = (1.0, 4.0, 16.0)
"""The seconds before a request to a teacher's server that failed is sent again."""


class Teacher:
    """The teachers of a run."""

    def __init__(
        self,
        config: Config,
        template: ChatTemplate,
        learner: Learner,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        longest: int = 0,
    ):
        """Load the teachers that the learner holds, and connect to the others.

        Args:
            config: the config of the run.
            template: the policy's chat template.
            learner: holds the teachers that are models.
            run: runs a coroutine in the event loop of the rollouts.
            longest: the tokens of the longest row that the policy may read.

        Raises:
            ConfigError: a teacher cannot be loaded, accepts only shorter rows, or has another
                tokenizer than the policy.
            EngineError: a server does not answer.
        """
        self._config, self._template, self._learner, self._run = config, template, learner, run
        self._toolbox = LocalToolbox()
        self._max_lengths: dict[str, int] = {}
        self._servers: dict[str, SGLangEngine] = {}
        for name in config.teacher.names:
            if is_url(name):
                try:
                    self._servers[name] = _connect(name, template.tokenizer, config.model.path)
                except EngineError as e:
                    advice = f"If it needs an API key, set {TOKEN}"
                    raise EngineError(f"teacher.model={name}: {e}. {advice}") from e
                self._max_lengths[name] = self._servers[name].max_length
            else:
                path = config.model.path if name == POLICY else name
                self._max_lengths[name] = max_row_length(load_model_config(path))
                if path != config.model.path:
                    learner.ranks.vocabulary(path)  # This loads it.
            if self._max_lengths[name] < longest:
                raise ConfigError(
                    f"teacher.model={name} accepts {self._max_lengths[name]} tokens, but a row may"
                    f" have {longest}. Decrease rollout.max_trajectory_tokens"
                )

    def logprobs(self, batch: Batch, groups: Sequence[Group]) -> Tensor:
        """Return the teachers' logprobs of the sampled tokens, (B, T) float32; 0 elsewhere.

        Args:
            batch: the step's rollouts.
            groups: the groups of the batch.

        Raises:
            RunStopped: a row is too long for its teacher, a segment does not begin with its row's
                prompt (`teacher.prompt`), or a logprob is not finite.
            EngineError: a server does not answer, although requests were repeated.
        """
        teacher = self._config.teacher
        if batch.images is not None:
            self._check_images(teachers_of(teacher, batch, groups))
        rows: TokenRows = self._replace_prompts(batch, groups) if teacher.prompt else batch
        names = teachers_of(teacher, batch, groups)
        self._check_lengths(batch, rows, names)

        def score(rows: TokenRows, name: str) -> Tensor:
            if name in self._servers:
                return self._run(_score(self._servers[name], rows))
            return self._learner.teacher_logprobs(rows, name)

        out = score_rows(rows, names, score)
        check_logprobs(batch, out, batch.response_mask, "teacher")
        return out

    def _check_images(self, names: Sequence[str]) -> None:
        """Raise `RunStopped` if a teacher of rows with images cannot score them."""
        for name in filter(None, dict.fromkeys(names)):
            problem = ""
            if name in self._servers:
                problem = "agentrl sends no images to a teacher's server"
            elif self._config.teacher.prompt:
                problem = "teacher.prompt does not work with images"
            elif name != POLICY and not reads_images(load_model_config(name)):
                problem = "it reads no images"
            if problem:
                raise RunStopped(
                    f"rows of this step have images, which teacher.model={name} cannot score:"
                    f" {problem}. Use a model that reads images, without teacher.prompt"
                )

    def _replace_prompts(self, batch: Batch, groups: Sequence[Group]) -> TokenRows:
        """Return the rows with the prompts that the teacher reads. It chooses its own experts."""
        prompts: list[array[int]] = []
        for group in groups:
            messages, schemas = opening_of(group.sample, self._toolbox)
            changed = teacher_messages(self._config.teacher, group.sample, messages)
            ours = self._template.prompt(messages, schemas)
            theirs = self._template.prompt(changed, schemas)
            for scored in group.scored:
                for segment in scored.trajectory.segments:
                    if segment.prompt_ids[: len(ours)] != ours:
                        raise RunStopped(
                            f"teacher.prompt: a row of tokens of episode"
                            f" {scored.trajectory.episode_id} does not begin with the prompt of"
                            f" row {group.sample.row}: it is that of another conversation, or an"
                            " environment has changed it. Such rows need a teacher without"
                            " teacher.prompt"
                        )
                    prompts.append(theirs + segment.prompt_ids[len(ours) :])
        width = max(map(len, prompts))
        padding = [token_array([0] * (width - len(prompt))) for prompt in prompts]
        ids = [(pad + prompt).tolist() for pad, prompt in zip(padding, prompts, strict=True)]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        return TokenRows(
            torch.tensor(ids),
            lengths,
            batch.response_ids,
            batch.response_lengths,
            batch.response_mask,
        )

    def _check_lengths(self, batch: Batch, rows: TokenRows, names: Sequence[str]) -> None:
        lengths = (rows.prompt_lengths + rows.response_lengths).tolist()
        for b, (length, name) in enumerate(zip(lengths, names, strict=True)):
            if length > self._max_lengths[name]:
                raise RunStopped(
                    f"episode {batch.episodes[int(batch.rollout[b])]} has a row of {length} tokens"
                    f" as the teacher reads it, but {name} accepts {self._max_lengths[name]}."
                    " Decrease rollout.max_trajectory_tokens"
                )


def teachers_of(config: TeacherConfig, batch: Batch, groups: Sequence[Group]) -> list[str]:
    """Return the teacher of each row of a batch, (B).

    Args:
        config: the section `teacher`.
        batch: the step's rollouts.
        groups: the groups of the batch.
    """
    of_rollout = [config.of(g.sample.data_source) for g in groups for _ in g.scored]
    return [of_rollout[r] for r in batch.rollout.tolist()]


def score_rows(
    rows: TokenRows, names: Sequence[str], score: Callable[[TokenRows, str], Tensor]
) -> Tensor:
    """Return the logprobs of each row's teacher, (B, T) float32; 0 outside the mask.

    Args:
        rows: the rows as the teachers read them.
        names: the teacher of each row.
        score: returns the logprobs of a teacher at the tokens of the mask, 0 elsewhere.
    """
    out = torch.zeros(rows.response_mask.shape)
    for name in dict.fromkeys(names):
        is_chosen = torch.tensor([other == name for other in names])
        out += score(replace(rows, response_mask=rows.response_mask & is_chosen[:, None]), name)
    return out


def _connect(url: str, tokenizer: Any, policy: str) -> SGLangEngine:
    """Return the client of a teacher's server, whose tokenizer is the policy's."""
    key = os.environ.get(TOKEN, "")
    info = AdminClient(url, key=key, admin_key="", process=None).ask("/model_info")
    folder = info.get("tokenizer_path")
    if not folder:
        raise ConfigError(f"teacher.model={url} does not report its tokenizer: it is not SGLang")
    check_same_tokens(tokenizer, folder, policy, url)
    # Not `model_path`: after an update of the weights it is a folder that is gone.
    vocabulary = load_model_config(folder).get_text_config().vocab_size
    return SGLangEngine(url, vocabulary=vocabulary, key=key)


async def _score(server: SGLangEngine, rows: TokenRows) -> Tensor:
    """Return the logprobs of the tokens of the mask by a server, (B, T) float32; 0 elsewhere."""
    mask = rows.response_mask
    out = torch.zeros(mask.shape)
    width = rows.prompt_ids.shape[1]

    async def score_row(b: int) -> None:
        prompt, length = int(rows.prompt_lengths[b]), int(rows.response_lengths[b])
        ids = torch.cat([rows.prompt_ids[b, width - prompt :], rows.response_ids[b, :length]])
        scores = torch.tensor(await _score_ids(server, token_array(ids.tolist())))
        out[b, :length] = torch.where(mask[b, :length], scores[prompt:], 0.0)

    await run_all([score_row(b) for b in mask.any(1).nonzero()[:, 0].tolist()])
    return out


async def _score_ids(server: SGLangEngine, ids: array[int]) -> array[float]:
    """Return the logprob of each token of a row, repeating requests that fail."""
    for pause in (*PAUSES, None):
        try:
            return await server.score(ids)
        except RequestRefused:
            raise
        except EngineError as e:
            if pause is None:
                raise EngineError(
                    f"the teacher {server.url} failed {len(PAUSES) + 1} times: {e}. No token was"
                    " trained without it"
                ) from e
            await asyncio.sleep(pause)
    raise AssertionError
