"""A transformers model that decodes rows of different lengths together."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.engine.base import Sampling
from agentrl.engine.local.rows import RowCache, Rows
from agentrl.engine.local.windows import (
    LONG,
    NoSmallCopy,
    describe_windows,
    find_rope_types,
    find_windows,
    small_copy,
)
from agentrl.errors import EngineError, UserError

PREFILL_TOKENS = 2048
"""The most tokens of a prefill pass, padding included (at least one row's chunk)."""
PREFILL_CHUNK = 512
"""A long prompt is fed in chunks of this length, which limits the size of the attention mask."""
GROUPED = "agentrl_grouped"
"""The name under which `grouped_attention` is registered in transformers."""


class CannotDecode(UserError):
    """The model cannot be decoded by `Decoder`."""

    def __init__(self, model: PreTrainedModel, reason: str):
        super().__init__(
            f"the local engine cannot run {type(model).__name__}: {reason}. Use"
            " rollout.name=sglang, or a decoder in which every layer sees the whole row (Qwen2,"
            " Qwen3, Llama, ...)."
        )
        self.reason = reason


class Decoder:
    """The model, its rows and their keys and values; used by one thread at a time.

    Legend: N rows at the front that decode, M rows that are prefilled, T tokens, L visible
    positions, V vocabulary.
    """

    def __init__(self, model: PreTrainedModel):
        """Use a model, which is put in eval mode. Nothing else may use it.

        Raises:
            UserError: the model cannot be decoded this way.
        """
        config = model.config.get_text_config(decoder=True)
        self.model = model.eval()
        self.device = model.device
        self.vocabulary: int = config.vocab_size
        self.max_length: int = config.max_position_embeddings
        self.rows = Rows()
        self._cache = RowCache()
        # transformers 5.24 renamed the argument.
        renamed = "cache" in inspect.signature(model.forward).parameters
        self._cache_name = "cache" if renamed else "past_key_values"
        if model.config.is_encoder_decoder:
            raise CannotDecode(self.model, "it has an encoder")
        if "longrope" in find_rope_types(config):  # Rows never reach the lengths of "dynamic".
            raise CannotDecode(
                self.model,
                "its rotary positions (longrope) depend on the length of the row, so the keys of a"
                " short row are wrong when the row becomes longer",
            )
        self._check_windows()
        if model.config._attn_implementation == "sdpa" and self.device.type == "cpu":
            model.set_attn_implementation(GROUPED)
        self._check_cache()

    def grow(self, rows: int, capacity: int) -> None:
        """Make room for at least `rows` rows, and at least `capacity` tokens per row."""
        shape = self.rows.shape
        if rows > shape[0] or capacity > shape[1]:
            self.rows.grow(rows, capacity)
            self._cache.grow(*self.rows.shape)

    def swap(self, a: list[int], b: list[int]) -> None:
        """Exchange rows `a` with rows `b`."""
        cached = self.rows.cached
        moves = [(s, t) for s, t in zip(a + b, b + a, strict=True) if cached[s]]
        self._cache.copy(moves, int(cached[a + b].max(initial=0)))
        self.rows.swap(a, b)

    def clear(self, row: int) -> None:
        """Clear a row whose values are NaN.

        Until the row is packed away, it decodes a valid token.
        """
        self.rows.cached[row] = 0
        self.rows.ids[row, 0] = 0
        self.rows.length[row] = 1
        self._cache.clear(row)

    def prefill(self, n: int) -> None:
        """Fill the caches of the first n rows up to the second to last token.

        Empty rows with the same prompt are computed once.
        """
        rows = self.rows
        missing = np.flatnonzero(rows.alive[:n] & (rows.cached[:n] < rows.length[:n] - 1))
        leaders: dict[bytes, int] = {}
        duplicates: list[tuple[int, int]] = []
        rows_left: list[int] = []
        for row in missing.tolist():
            if rows.cached[row] == 0:
                leader = leaders.setdefault(rows.ids[row, : rows.length[row] - 1].tobytes(), row)
                if leader != row:
                    duplicates.append((leader, row))
                    continue
            rows_left.append(row)
        # Empty rows first, sorted by length: little padding, and attention over new tokens only.
        rows_left.sort(key=lambda r: (rows.cached[r] > 0, rows.length[r] - rows.cached[r], r))
        while rows_left:
            width = 0
            m = 0
            for row in rows_left:
                width = max(width, min(PREFILL_CHUNK, int(rows.length[row] - 1 - rows.cached[row])))
                if m and (m + 1) * width > PREFILL_TOKENS:
                    break
                m += 1
            batch, rows_left = rows_left[:m], rows_left[m:]
            while batch:
                self._feed(np.array(batch))
                batch = [r for r in batch if rows.cached[r] < rows.length[r] - 1]
        if duplicates:
            self._cache.copy(duplicates, int(rows.length[:n].max()))
            for leader, row in duplicates:
                rows.cached[row] = rows.cached[leader]

    def _feed(self, at: np.ndarray) -> None:
        """Run one prefill pass over rows `at`: a chunk of each row's missing tokens."""
        rows = self.rows
        begin = rows.cached[at]
        count = np.minimum(rows.length[at] - 1 - begin, PREFILL_CHUNK)
        offsets = np.arange(count.max())
        real = offsets < count[:, None]  # (M, T)
        positions = np.where(real, begin[:, None] + offsets, begin[:, None])
        fresh = not begin.any()
        length = 0 if fresh else int((begin + count).max())
        position_ids = self._tensor(positions)
        self._cache.feed_rows(self._tensor(at), position_ids, self._tensor(real), length)
        # Empty right-padded rows need only the causal mask, which the model creates.
        mask = None if fresh else self._mask(position_ids, length)
        self.model(
            input_ids=self._tensor(rows.ids[at[:, None], positions].astype(np.int64)),
            attention_mask=mask,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self._cache},
        )
        rows.cached[at] += count
        rows.prefilled[at] += count

    def decode(self, n: int) -> torch.Tensor:
        """Feed the last token of each of the first n rows; return the logits (N, V) after it."""
        rows = self.rows
        last = rows.length[:n] - 1
        length = int(last.max()) + 1
        position_ids = self._tensor(last)
        self._cache.feed_front(position_ids, length)
        ids = rows.ids[np.arange(n), last].astype(np.int64)
        return self.model(
            input_ids=self._tensor(ids)[:, None],
            attention_mask=self._mask(position_ids[:, None], length),
            position_ids=position_ids[:, None],
            use_cache=True,
            **{self._cache_name: self._cache},
        ).logits[:, -1]

    def score(self, token_ids: np.ndarray, temperature: float) -> array[float]:
        """Return the logprob of each token given the tokens before it. The first token's is 0."""
        ids = self._tensor(token_ids.astype(np.int64))[None]  # (1, T)
        cache = DynamicCache(config=self.model.config)
        scores = [torch.zeros(1)]
        for begin in range(0, len(token_ids) - 1, PREFILL_CHUNK):
            piece = ids[:, begin : begin + PREFILL_CHUNK]
            keys = {self._cache_name: cache}
            logits = self.model(input_ids=piece, use_cache=True, **keys).logits[0]
            after = ids[0, begin + 1 : begin + 1 + piece.shape[1]]
            logprobs = (logits[: len(after)].float() / temperature).log_softmax(-1)
            scores.append(logprobs.gather(-1, after[:, None])[:, 0].cpu())
        return array("f", torch.cat(scores).numpy())

    def load(self, update: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Copy named tensors into the model in place, and invalidate all keys and values.

        Returns:
            The number of bytes of the tensors.

        Raises:
            EngineError: the model has no tensor of that name, or its shape differs.
        """
        state, size = self.model.state_dict(), 0
        with torch.no_grad():
            for name, tensor in update:
                if name not in state:
                    raise EngineError(
                        f"published weights: {type(self.model).__name__} has no tensor {name!r}"
                    )
                if state[name].shape != tensor.shape:
                    raise EngineError(
                        f"published weights: {name!r} has shape {tuple(tensor.shape)}, but the"
                        f" engine's has {tuple(state[name].shape)}"
                    )
                state[name].copy_(tensor)
                size += tensor.nbytes
        self.rows.cached[:] = 0
        return size

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Return the causal mask (N, 1, T, L) of tokens at positions (N, T): 0 or -inf."""
        hidden = torch.arange(length, device=self.device) > positions[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=self.model.dtype, device=self.device).masked_fill_(
            hidden, -torch.inf
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    def _check_windows(self) -> None:
        """Check that rows longer than the model's attention windows are decoded correctly.

        Raises:
            UserError: such rows are not decoded correctly, or no small copy can be built.
        """
        if find_windows(self.model.config):
            _check_small_copy(self.model, self.device)

    def _check_cache(self) -> None:
        """Check that decoding with the cache equals plain forward passes, on rows of two lengths.

        Raises:
            UserError: the logprobs differ, or the model does not accept this cache.
        """
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.3
        lengths = LONG // 2, min(LONG, self.max_length)
        prompts = [np.arange(1, 1 + t, dtype=np.int32) % self.vocabulary for t in lengths]
        self.grow(2, LONG)
        with torch.inference_mode():
            try:
                for prefix_length in (4, None):  # The second turn continues from the cache.
                    for row, prompt in enumerate(prompts):
                        self.rows.begin_turn(
                            row, prompt[:prefix_length], Sampling(), 0, self.max_length
                        )
                    self.prefill(2)
                ours = self.decode(2)
                plain = [
                    self.model(input_ids=self._tensor(p)[None], use_cache=False).logits[0, -1]
                    for p in prompts
                ]
            except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as e:
                raise CannotDecode(
                    self.model,
                    "it does not run with this engine's cache, which holds keys and values only"
                    f" ({type(e).__name__}: {e})",
                ) from e
            difference = torch.stack(plain).float().log_softmax(-1) - ours.float().log_softmax(-1)
        if not difference.abs().max() < tolerance:
            raise CannotDecode(
                self.model, f"its logprobs with a cache differ by {difference.abs().max():.3g}"
            )
        self.rows.cached[:] = 0
        self.rows.alive[:] = False


def check_config(config: PretrainedConfig) -> None:
    """Check that the local engine decodes models with a config. No weights are loaded.

    Raises:
        UserError: a small copy of such a model is not decoded correctly, or cannot be built.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _check_small_copy(model, "cpu")


def _check_small_copy(model: PreTrainedModel, device: torch.device | str) -> None:
    windows = f"{describe_windows(model.config)}, and " if find_windows(model.config) else ""
    try:
        short = small_copy(model, device)
    except NoSmallCopy as e:
        raise CannotDecode(model, f"{windows}{e}") from e
    try:
        Decoder(short)  # The constructor compares the copy's cached logits with plain passes.
    except Exception as e:
        cause = e.reason if isinstance(e, CannotDecode) else f"{type(e).__name__}: {e}"
        reason = f"{windows}the test with a small copy of the model failed ({cause})"
        raise CannotDecode(model, reason) from e


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with one query per row by two small matrix products on the key/value heads.

    Other shapes are passed to `sdpa`, which first repeats keys and values for every query head.
    Decoding 128 rows of 200 tokens on two cores takes 4.0 ms per step with this function and 5.1 ms
    with `sdpa` (tiny Qwen2 shape).

    Args:
        module: the attention layer.
        query: (N, heads, T, head_dim).
        key: (N, kv_heads, L, head_dim).
        value: (N, kv_heads, L, value_dim).
        attention_mask: (N, 1, T, L), added to the scores; None is causal.
        scaling: the factor of the scores.
        **kwargs: for `sdpa`.

    Returns:
        The output (N, T, heads, value_dim), and None instead of the attention weights.
    """
    if query.shape[2] != 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    n, heads, _, head_dim = query.shape
    grouped = (query * scaling).view(n, key.shape[1], -1, head_dim)
    weights = (grouped @ key.transpose(2, 3)).add_(attention_mask).softmax(-1)
    return (weights @ value).view(n, 1, heads, value.shape[3]), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
