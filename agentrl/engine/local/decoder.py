"""A transformers model that decodes rows of different lengths together."""

from __future__ import annotations

import inspect
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentrl.engine.base import Sampling
from agentrl.engine.checks import image_starts
from agentrl.engine.local.graphs import LENGTHS, DecodeGraphs
from agentrl.engine.local.load import empty_model, max_row_length
from agentrl.engine.local.rounding import MAX_ROUNDINGS, rounded_again
from agentrl.engine.local.routers import Routers
from agentrl.engine.local.rows import CachedRows, ImagePart, RowCache
from agentrl.engine.local.windows import (
    LONG,
    NoSmallCopy,
    describe_windows,
    find_rope_types,
    find_windows,
    small_copy,
)
from agentrl.errors import EngineError, UserError
from agentrl.images import RowImage, read_pixels

log = logging.getLogger("agentrl")

PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""The most tokens of a prefill pass by type of device, padding included (at least one row's
chunk)."""
MIN_PREFIX = 16
"""The length in tokens of the shortest prefix that empty rows share."""
MIN_SAVED_SHARE = 1 / 16
"""A shared prefix is computed once if that saves this share of the tokens of a full pass."""
CATCH_UP_TOKENS = 32
"""With CUDA graphs, a row that lacks at most this many tokens gets one in each decode step. A
prefill pass takes as long as ten decode steps, and no row decodes meanwhile."""
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

    def __init__(
        self, model: PreTrainedModel, processor: Any = None, *, returns_experts: bool = False
    ):
        """Use a model, which is put in eval mode. Nothing else may use it.

        Args:
            model: the model.
            processor: transformers' image processor; None: the model reads no images.
            returns_experts: True if turns have `Sampling.experts_from`.

        Raises:
            UserError: the model cannot be decoded this way, or it has no routers.
        """
        config = model.config.get_text_config(decoder=True)
        self.model, self.processor = model.eval(), processor
        self.device = model.device
        self.vocabulary: int = config.vocab_size
        self.max_length = max_row_length(config)
        self._routers = Routers(self.model) if returns_experts else None
        self.rows = CachedRows(self._routers.width if self._routers else 0)
        self._cache = RowCache()
        # transformers 5.24 renamed the argument.
        renamed = "cache" in inspect.signature(model.forward).parameters
        self._cache_name = "cache" if renamed else "past_key_values"
        if model.config.is_encoder_decoder:
            raise CannotDecode(self.model, "it has an encoder")
        if "longrope" in find_rope_types(model):  # Rows never reach the lengths of "dynamic".
            raise CannotDecode(
                self.model,
                "its rotary positions (longrope) depend on the length of the row, so the keys of a"
                " short row are wrong when the row becomes longer",
            )
        self._check_windows()
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(GROUPED)
        self._prefill_tokens = PREFILL_TOKENS.get(self.device.type, PREFILL_TOKENS["cpu"])
        self._graphs: DecodeGraphs | None = None
        self._check_cache()
        if self.device.type == "cuda" and not self._routers:  # Graphs would record no experts.
            self._graphs = DecodeGraphs(self._decode)

    def grow(self, rows: int, capacity: int) -> None:
        """Make room for at least `rows` rows, and at least `capacity` tokens per row."""
        shape = self.rows.shape
        if rows > shape[0] or capacity > shape[1]:
            self.rows.grow(rows, capacity)
            self._cache.grow(*self.rows.shape)
            if self._graphs:
                self._graphs.clear()

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

        Empty rows with the same prompt are computed once, and so is a prefix that several of them
        share, such as a system message. With graphs, rows that lack few tokens do not change:
        `decode` feeds these tokens.
        """
        rows = self.rows
        needed = rows.length[:n] - 1 - (CATCH_UP_TOKENS if self._graphs else 0)
        lacks_image = rows.cached[:n] < rows.image_end[:n]
        missing = np.flatnonzero(rows.alive[:n] & ((rows.cached[:n] < needed) | lacks_image))
        leaders: dict[tuple[bytes, tuple[RowImage, ...]], int] = {}
        duplicates: list[tuple[int, int]] = []
        rows_left: list[int] = []
        # A row whose experts stay as they are comes last: it has none of these weights to copy.
        for row in sorted(missing.tolist(), key=lambda row: int(rows.recorded[row])):
            if rows.cached[row] == 0:
                part: ImagePart | None = rows.image_part[row] or None
                key = rows.ids[row, : rows.length[row] - 1].tobytes(), part.images if part else ()
                leader = leaders.setdefault(key, row)
                if leader != row:
                    duplicates.append((leader, row))
                    continue
            rows_left.append(row)
            if rows.cached[row] < rows.image_end[row]:
                self._feed_images(row)
        self._share_prefixes([row for row in rows_left if rows.cached[row] == 0])
        # A row that equals the shared prefix lacks nothing: a pass of such rows would be empty.
        rows_left = [row for row in rows_left if rows.cached[row] < rows.length[row] - 1]
        # Empty rows first, sorted by length: little padding, and attention over new tokens only.
        rows_left.sort(key=lambda r: (rows.cached[r] > 0, rows.length[r] - rows.cached[r], r))
        while rows_left:
            width = 0
            m = 0
            for row in rows_left:
                width = max(width, min(PREFILL_CHUNK, int(rows.length[row] - 1 - rows.cached[row])))
                if m and (m + 1) * width > self._prefill_tokens:
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
                rows.copy_experts(leader, row, int(rows.cached[row]))

    def _share_prefixes(self, empty: list[int]) -> None:
        """Fill the caches of empty rows up to the end of the prefix that they share."""
        rows = self.rows
        groups: dict[bytes, list[int]] = {}
        for row in empty:
            if rows.length[row] > MIN_PREFIX:
                groups.setdefault(rows.ids[row, :MIN_PREFIX].tobytes(), []).append(row)
        for group in groups.values():
            end = int(rows.length[group].min()) - 1
            differs = (rows.ids[group, :end] != rows.ids[group[0], :end]).any(0)
            end = int(differs.argmax()) if differs.any() else end
            first, *others = group
            if len(others) * end < MIN_SAVED_SHARE * self._prefill_tokens:
                continue
            while rows.cached[first] < end:
                self._feed(np.array([first]), end)
            self._cache.copy([(first, row) for row in others], end)
            rows.cached[others] = end
            for row in others:
                rows.copy_experts(first, row, end)

    def _feed(self, at: np.ndarray, end: int | None = None) -> None:
        """Run one prefill pass over rows `at`: a chunk of each row's tokens that are missing.

        Args:
            at: the rows.
            end: the number of tokens to fill; None: all but the last of each row.
        """
        rows = self.rows
        begin = rows.cached[at]
        ends = rows.length[at] - 1 if end is None else end
        count = np.minimum(ends - begin, PREFILL_CHUNK)
        offsets = np.arange(count.max())
        real = offsets < count[:, None]  # (M, T)
        positions = np.where(real, begin[:, None] + offsets, begin[:, None])
        fresh = not begin.any()
        length = 0 if fresh else int((begin + count).max())
        position_ids = self._tensor(positions)
        self._cache.feed_rows(self._tensor(at), position_ids, self._tensor(real), length)
        # Empty right-padded rows need only the causal mask, which the model creates.
        mask = None if fresh else self._mask(position_ids, length)
        with self._recording(at.repeat(len(offsets)), np.where(real, positions, -1).flatten()):
            self.model(
                input_ids=self._tensor(rows.ids[at[:, None], positions].astype(np.int64)),
                attention_mask=mask,
                position_ids=self._tensor(positions + rows.shift[at, None]),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: self._cache},
            )
        rows.cached[at] += count
        rows.prefilled[at] += count

    def _feed_images(self, row: int) -> None:
        """Run a prefill pass over the missing tokens of one row up to the end of its last image."""
        rows, part, begin = self.rows, self.rows.image_part[row], int(self.rows.cached[row])
        indices = self._tensor(np.arange(begin, part.end))[None]  # (1, T)
        length = part.end if begin else 0
        real = torch.ones_like(indices, dtype=torch.bool)
        self._cache.feed_rows(self._tensor(np.array([row])), indices, real, length)
        with self._recording(np.full(part.end - begin, row), np.arange(begin, part.end)):
            self.model(
                input_ids=self._tensor(rows.ids[row, None, begin : part.end].astype(np.int64)),
                attention_mask=self._mask(indices, length) if begin else None,
                use_cache=True,
                logits_to_keep=1,
                **self._image_inputs(part, begin),
                **{self._cache_name: self._cache},
            )
        rows.cached[row] = part.end
        rows.prefilled[row] += part.end - begin

    def image_part(self, row: np.ndarray, images: Sequence[RowImage]) -> ImagePart | None:
        """Return the part of a row with its images; None if it has none.

        Raises:
            RequestRefused: the row has not exactly the placeholder tokens of the images.
        """
        if not images:
            return None
        starts = image_starts(row, images, "images")
        ids = self._tensor(row[: starts[-1] + images[-1].tokens].astype(np.int64))[None]
        patch, model = self.processor.patch_size, self.model.base_model
        positions, _ = model.get_rope_index(  # type: ignore[operator]
            ids,
            mm_token_type_ids=(ids == images[0].token_id).int(),
            image_grid_thw=torch.tensor([[1, i.height // patch, i.width // patch] for i in images]),
        )
        return ImagePart(tuple(images), tuple(starts), positions[:, 0].cpu().numpy())

    def _image_inputs(self, part: ImagePart, begin: int = 0) -> dict[str, torch.Tensor]:
        """Return what a pass needs beside the ids of a part of a row, from a token on."""
        pairs = zip(part.images, part.starts, strict=True)
        pixels = read_pixels(self.processor, [i for i, start in pairs if start >= begin])
        at_device = {name: value.to(self.device) for name, value in pixels.items()}
        return at_device | {"position_ids": self._tensor(part.positions[:, None, begin:])}

    def decode(self, n: int) -> torch.Tensor:
        """Feed each of the first n rows its next token; return the logits (N, V) after it.

        The next token is the first one that is not cached. Without graphs, it is the last token of
        the row, because `prefill` has cached all others.
        """
        rows, graphs = self.rows, self._graphs
        # Graphs also feed unused rows after the first n. Nothing reads what is written there.
        width = 1 << (n - 1).bit_length() if graphs else n
        next_index = np.minimum(rows.cached[:width], rows.length[:width] - 1).clip(0)
        length = int(next_index[:n].max()) + 1
        positions = self._tensor(next_index)
        rotary = self._tensor(next_index + rows.shift[:width])
        ids = self._tensor(rows.ids[np.arange(width), next_index].astype(np.int64))
        if graphs:
            rounded = min(-(-length // LENGTHS) * LENGTHS, rows.shape[1])
            try:
                return graphs(ids, positions, rotary, rounded)[:n]
            except RuntimeError as e:
                log.warning("the local engine decodes without CUDA graphs: %s", e)
                self._graphs = None
        with self._recording(np.arange(len(next_index)), next_index):
            return self._decode(ids, positions, rotary, length)[:n]

    def _decode(
        self, ids: torch.Tensor, positions: torch.Tensor, rotary: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Feed tokens (N) at positions (N) to the first N rows; return the logits (N, V).

        `rotary` are the rotary positions of the tokens (N).
        """
        self._cache.feed_front(positions, length)
        return self.model(
            input_ids=ids[:, None],
            attention_mask=self._mask(positions[:, None], length),
            position_ids=rotary[:, None],
            use_cache=True,
            **{self._cache_name: self._cache},
        ).logits[:, -1]

    @contextmanager
    def _recording(self, rows: np.ndarray, positions: np.ndarray) -> Iterator[None]:
        """Record the experts of the pass within the block.

        Args:
            rows: (N) the row of each token.
            positions: (N) its position; -1: it is padding.
        """
        if self._routers is None:
            yield
            return
        with self._routers.recording() as recorded:
            yield
        experts, real = self._routers.join(recorded).cpu().numpy(), positions >= 0
        self.rows.record(rows[real], positions[real], experts[real])

    def score(self, token_ids: np.ndarray, images: Sequence[RowImage] = ()) -> array[float]:
        """Return the logprob of each token given the tokens before it.

        The first token's is 0, and so are those of the placeholder tokens of images.
        """
        ids = self._tensor(token_ids.astype(np.int64))[None]  # (1, T)
        cache = DynamicCache(config=self.model.config)
        scores = [torch.zeros(1)]
        part = self.image_part(token_ids, images)
        first = part.end if part else PREFILL_CHUNK
        for begin in [0, *range(first, len(token_ids) - 1, PREFILL_CHUNK)]:
            piece = ids[:, begin : begin + PREFILL_CHUNK if begin else first]
            keys: dict[str, Any] = {self._cache_name: cache}
            if part and begin:
                indices = torch.arange(begin, begin + piece.shape[1], device=self.device)
                keys["position_ids"] = indices[None] + part.shift
            elif part:
                keys |= self._image_inputs(part)
            logits = self.model(input_ids=piece, use_cache=True, **keys).logits[0]
            after = ids[0, begin + 1 : begin + 1 + piece.shape[1]]
            logprobs = logits[: len(after)].float().log_softmax(-1)
            scores.append(logprobs.gather(-1, after[:, None])[:, 0].cpu())
        values = torch.cat(scores).numpy()
        if images:
            values[token_ids == images[0].token_id] = 0.0
        return array("f", values)

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
                ours = self.decode(2).float().log_softmax(-1)
                plain = self._plain_logprobs(prompts)
                with rounded_again(self.model, seed=0):
                    rounding = self._plain_logprobs(prompts) - plain
            except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as e:
                raise CannotDecode(
                    self.model,
                    "it does not run with this engine's cache, which holds keys and values only"
                    f" ({type(e).__name__}: {e})",
                ) from e
        difference = (plain - ours).abs().max()
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.3
        if not difference < max(tolerance, MAX_ROUNDINGS * rounding.abs().max().item()):
            raise CannotDecode(self.model, f"its logprobs with a cache differ by {difference:.3g}")
        self.rows.cached[:] = 0
        self.rows.alive[:] = False

    def _plain_logprobs(self, rows: list[np.ndarray]) -> torch.Tensor:
        """Return the logprobs after each row, (N, V), by passes without a cache."""
        inputs = [self._tensor(row)[None] for row in rows]
        logits = [self.model(input_ids=x, use_cache=False).logits[0, -1] for x in inputs]
        return torch.stack(logits).float().log_softmax(-1)


def check_config(config: PretrainedConfig) -> None:
    """Check that the local engine decodes models with a config. No weights are loaded.

    Raises:
        UserError: a small copy of such a model is not decoded correctly, or cannot be built.
    """
    _check_small_copy(empty_model(config, dtype=torch.float32), "cpu")


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
    grouped = query.view(n, key.shape[1], -1, head_dim)
    if query.is_cuda:
        mask = attention_mask.expand(n, key.shape[1], grouped.shape[2], -1)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(n, 1, heads, value.shape[3]), None
    grouped = grouped * scaling
    weights = (grouped @ key.transpose(2, 3)).add_(attention_mask).softmax(-1)
    return (weights @ value).view(n, 1, heads, value.shape[3]), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
