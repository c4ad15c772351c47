"""The worker thread of the local engine, and its interface to the other threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.engine.base import Engine, Sampling, Update
from agentrl.engine.checks import check_sampling, image_starts, validate_row
from agentrl.engine.local.decoder import Decoder
from agentrl.engine.local.load import (
    compute_dtype,
    image_processor,
    load_causal_lm,
    reads_images,
    resolve_device,
)
from agentrl.engine.local.schedule import (
    DecodeSchedule,
    EpisodeState,
    TurnRequest,
    WaitLimit,
    settle,
)
from agentrl.engine.local.stepper import Stepper, StopStrings
from agentrl.errors import EngineError, RequestRefused
from agentrl.images import FAMILIES, RowImage
from agentrl.torch_threads import ThreadCount, choose_threads
from agentrl.trajectory import Generation

log = logging.getLogger("agentrl")


class LocalEngine(Engine):
    """Samples from a transformers causal language model in this process.

    Forward passes run in one worker thread. `generate` and `scores` may be called from any asyncio
    loop. Turns join and leave between decode steps, and the keys and values of an episode are kept
    from its first turn to its end.

    With `deterministic=True`, two runs with the same weights, episodes and seeds compute the same
    bits, however fast tools answer. There are three conditions: all episodes that run together are
    announced before one of them requests a turn, no episode waits for another episode, and no
    episode keeps the engine waiting for more than `patience` seconds. The cost is that the engine
    waits if an episode is due that has neither requested a turn nor ended (see `schedule`). So
    limit the number of episodes by `slots`, not by a semaphore outside of the engine. After waiting
    `patience` seconds, the engine warns and continues without the late episode, whose turns then
    join when they are requested; the results of these episodes are no longer bit-exact.

    With `deterministic=False`, all turns join when they are requested, and logprobs differ by
    floating-point noise from run to run.
    """

    max_length: int
    """The longest row, in tokens: prompt, response and observations."""
    threads: ThreadCount
    """The CPU threads with which the worker thread decodes."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        deterministic: bool,
        slots: int = 256,
        patience: float = 60.0,
        processor: Any = None,
        returns_experts: bool = False,
    ):
        """Start the worker thread.

        Args:
            model: a decoder with full attention in all layers. The engine owns it: it is put in
                eval mode, and `publish` writes into it.
            tokenizer: the tokenizer of the model; decodes sampled tokens if a request has stop
                strings.
            deterministic: whether the schedule depends only on episodes and turns.
            slots: the largest number of episodes that hold a row at once; other episodes wait.
            patience: with `deterministic`, the seconds to wait for an episode that neither requests
                a turn nor ends while another wants tokens. Keep it well below the time limit of
                episodes, or an episode that hangs makes the others fail; `math.inf`: no limit.
            processor: transformers' image processor (`agentrl.images.load_processor`); None: the
                model reads no images.
            returns_experts: True if turns have `Sampling.experts_from`.

        Raises:
            UserError: this engine cannot decode the model, or the model has no routers.
        """
        self._decoder = Decoder(model, processor, returns_experts=returns_experts)
        self.max_length, self.dtype = self._decoder.max_length, model.dtype
        # Of all weights, the embedding too: its rows are multiplied in the output layer.
        weights = sum(p.numel() for p in model.parameters())
        self.threads = choose_threads(current=torch.get_num_threads(), weights=weights)
        self._version = self._reprefilled = 0
        # The lock guards the attributes below. The decoder belongs to the worker thread; while that
        # is paused, to `publish`.
        self._changed = threading.Condition()
        self._schedule = DecodeSchedule(slots, deterministic)
        self._patience = WaitLimit(patience, self._schedule)
        self._stepper = Stepper(self._decoder, self._schedule, StopStrings(tokenizer))
        self._scores: list[tuple[Future[Any], np.ndarray, tuple[RowImage, ...]]] = []
        self._next_deadline = math.inf
        self._stepping = self._closing = False
        self._pause_count = 0
        self._failure = ""
        self._worker = threading.Thread(target=self._work, name="local-engine", daemon=True)
        self._worker.start()

    @classmethod
    def load(
        cls,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        device: str = "auto",
        deterministic: bool | None = None,
        patience: float = 60.0,
        returns_experts: bool = False,
    ) -> Self:
        """Load an engine with the model of a folder, in the precision of the learner's passes.

        In the precision of the files, rounding alone could make the engine sample from another
        policy than the one that is trained.

        Args:
            path: the folder or hub name of a model or a PEFT adapter, see `load_causal_lm`.
            tokenizer: the tokenizer of the model.
            device: "auto", "cpu" or "cuda".
            deterministic: see the constructor; by default true on a CPU.
            patience: see the constructor.
            returns_experts: see the constructor.

        Raises:
            UserError: there is no such model, or this engine cannot decode it.
        """
        device = resolve_device(device)
        model = load_causal_lm(path, compute_dtype(device), device)
        if deterministic is None:
            deterministic = device == "cpu"
        processor = image_processor(path) if reads_images(model.config) else None
        return cls(
            model,
            tokenizer,
            deterministic=deterministic,
            patience=patience,
            processor=processor,
            returns_experts=returns_experts,
        )

    # -- Sampler -----------------------------------------------------------------------------------

    def begin(self, episode_id: str, *, awaited: bool = True) -> None:
        with self._changed:
            self._check_running()
            self._schedule.begin(episode_id, awaited=awaited)

    async def generate(
        self,
        prompt_ids: array[int],
        sampling: Sampling,
        *,
        episode_id: str,
        seed: int,
        deadline: float,
        images: Sequence[RowImage] = (),
    ) -> Generation:
        """Sample a turn. It is cut at `max_length` as well as at `max_tokens`.

        Raises:
            EngineError: the prompt is too long or has tokens outside of the vocabulary; the episode
                is unknown or already has a turn in flight; the deadline passed; the logits were
                NaN; the request failed; the engine was closed.
            UserError: `sampling.stop` is not a tuple of non-empty strings.
        """
        request = f"episode {episode_id!r}"
        prompt = validate_row(prompt_ids, request, self.max_length, self._decoder.vocabulary)
        check_sampling(sampling, request)
        self._check_images(prompt, images, request)
        turn = TurnRequest(episode_id, prompt, sampling, seed, deadline, tuple(images))
        with self._changed:
            self._check_running()
            self._schedule.ask(turn)
            self._next_deadline = min(self._next_deadline, deadline)
            self._changed.notify_all()
        try:
            return await asyncio.wrap_future(turn.answer)
        except asyncio.CancelledError:
            with self._changed:
                self._next_deadline = -math.inf
                self._changed.notify_all()
            raise

    def end(self, episode_id: str) -> None:
        with self._changed:
            turn = self._schedule.end(episode_id)
            if turn is not None:
                settle(turn.answer, EngineError(f"episode {episode_id!r} ended during its turn"))
                self._next_deadline = -math.inf
            self._changed.notify_all()

    async def scores(
        self, token_ids: array[int], images: Sequence[RowImage] = ()
    ) -> list[array[float]]:
        """Score a row by a separate pass between decode steps.

        Raises:
            EngineError: the row is too long or has tokens outside of the vocabulary; it cannot be
                scored; the engine was closed.
        """
        vocabulary = self._decoder.vocabulary
        row = validate_row(token_ids, "score", self.max_length, vocabulary, room=0)
        self._check_images(row, images, "score")
        answer: Future[Any] = Future()
        with self._changed:
            self._check_running()
            self._scores.append((answer, row, tuple(images)))
            self._changed.notify_all()
        return [await asyncio.wrap_future(answer)]

    def reprefill_tokens(self) -> int:
        return self._reprefilled

    # -- EngineControl -----------------------------------------------------------------------------

    def publish(self, update: Update) -> int:
        """Copy named tensors into the model between two steps; the other tensors stay.

        All keys and values are dropped, unless the weights have not changed. Turns in flight go on;
        each token carries the version that sampled it.

        Raises:
            EngineError: the model has no tensor with one of the names, or its shape differs.
        """
        with self.paused():
            self._check_running()
            size = 0
            if update.is_changed:
                rows = self._decoder.rows
                self._reprefilled += int(rows.length[rows.alive].sum())
                size = self._decoder.load(update.weights())
            self._version = update.version
        return size

    def close(self) -> None:
        """Stop the worker thread and wait for its end. Requests in flight fail."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._worker.join()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause decoding within the block. Deadlines are not extended."""
        with self._changed:
            self._pause_count += 1
            self._changed.wait_for(lambda: not self._stepping)
        try:
            yield
        finally:
            with self._changed:
                self._pause_count -= 1
                self._changed.notify_all()

    def _check_images(self, row: np.ndarray, images: Sequence[RowImage], request: str) -> None:
        if images and self._decoder.processor is None:
            name = type(self._decoder.model).__name__
            raise RequestRefused(
                f"{request}: {name} reads no images here. Models that do: {', '.join(FAMILIES)}"
            )
        image_starts(row, images, request)

    def _check_running(self) -> None:
        if self._closing or self._failure:
            raise EngineError(self._failure or "the engine is closed")

    # -- the worker --------------------------------------------------------------------------------

    def _work(self) -> None:
        failure = "the engine is closed"
        # torch keeps the number for each thread: the learner's own stays.
        torch.set_num_threads(self.threads.count)
        try:
            with torch.inference_mode():
                while work := self._next_work():
                    for task in work:
                        task()
        except Exception as e:
            failure = f"the engine failed: {type(e).__name__}: {e}"
            log.exception("the local engine failed")
        with self._changed:
            self._failure = failure
            self._stepping = False
            self._changed.notify_all()
            answers = [turn.answer for _, turn in self._schedule.in_flight]
            answers += [answer for answer, *_ in self._scores]
        for answer in answers:
            settle(answer, EngineError(failure))

    def _next_work(self) -> list[Callable[[], None]]:
        """Wait for work, and return it; return an empty list when the engine closes."""
        with self._changed:
            self._stepping = False
            self._changed.notify_all()
            while not self._closing:
                if time.monotonic() >= self._next_deadline:
                    self._give_up_turns()
                if not self._pause_count:
                    work: list[Callable[[], None]] = [self._answer_scores] if self._scores else []
                    joined = self._patience.admit()
                    if self._schedule.decoding and not self._schedule.waiting_for:
                        work.append(partial(self._step, joined))
                    if work:
                        self._stepping = True
                        return work
                seconds = min(self._next_deadline, self._patience.ends) - time.monotonic()
                self._changed.wait(max(0.0, min(seconds, threading.TIMEOUT_MAX)))
            return []

    def _answer_scores(self) -> None:
        while self._scores:
            answer, row, images = self._scores[0]
            try:
                settle(answer, self._decoder.score(row, images))
            except Exception as e:
                settle(answer, EngineError(f"cannot score: {type(e).__name__}: {e}"))
            del self._scores[0]

    def _give_up_turns(self) -> None:
        """Drop the turns whose caller was cancelled or whose deadline has passed."""
        now = time.monotonic()
        for entry, turn in self._schedule.in_flight:
            if turn.deadline <= now:
                waiting_for = self._schedule.waiting_for
                settle(
                    turn.answer,
                    EngineError(
                        f"episode {entry.id!r}: the deadline passed"
                        + (f" while the engine waited for {waiting_for!r}" if waiting_for else "")
                    ),
                )
            if turn.answer.done():
                self._drop(entry)
        self._next_deadline = min(
            (turn.deadline for _, turn in self._schedule.in_flight), default=math.inf
        )

    def _drop(self, entry: EpisodeState) -> None:
        self._stepper.drop(entry)
        self._schedule.drop(entry)

    def _step(self, joined: list[tuple[EpisodeState, TurnRequest]]) -> None:
        outcomes = self._stepper.step(joined, self._version)
        with self._changed:
            self._schedule.step += 1
            for entry, turn, outcome in outcomes:
                if isinstance(outcome, EngineError):
                    self._drop(entry)
                else:
                    self._schedule.finish(entry)
                settle(turn.answer, outcome)
