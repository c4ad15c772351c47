"""From trajectories to tensors, and the mini-batches of an optimizer step.

Shapes, in this file and in all of `agentrl.learner`:

    B  segments (token rows); a rollout whose history was edited has several
    T  response tokens, sampled and observed, padded on the right
    P  prompt tokens, padded on the left
    R  rollouts
    G  groups: the rollouts of one sample
    V  vocabulary
    N  chosen tokens of some rows, flat: the sampled tokens that the loss reads

Baselines, rewards and metrics count rollouts. Only `collate` turns rollouts into segments, and each
sampled token is in exactly one row. The mini-batches of a step (one optimizer step each) are fixed
first, by rollouts. Then they are cut into micro-batches by a budget of tokens (`packing.py`), which
changes memory and nothing else: the loss is a sum, and its weights contain the denominator of the
whole mini-batch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.config import RewardConfig
from agentrl.errors import RunStopped
from agentrl.images import RowImage
from agentrl.trajectory import Group, Scored, Segment, token_array


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that `rollout.top_p` and `rollout.top_k` kept at each token of a batch.

    The policy was sampled from the softmax over these tokens alone, so all logprobs and entropies
    of training are over them, too.
    """

    ids: Tensor
    """(K,) int32, those of one token after those of another."""
    counts: Tensor
    """(B, T) or (N,) int32: how many of `ids` belong to each token; 0: it was sampled from all."""

    def of(self, rows: Tensor, chosen: Tensor) -> KeptTokens:
        """Return those of chosen tokens, with counts of (N,).

        Args:
            rows: (b,) row numbers.
            chosen: (b, T) bool.
        """
        ends = self.counts.flatten().cumsum(0).view(self.counts.shape)
        counts, ends = self.counts[rows][chosen], ends[rows][chosen]
        shifts = (ends - counts.cumsum(0)).repeat_interleave(counts)
        return KeptTokens(self.ids[torch.arange(len(shifts)) + shifts], counts)

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the row and the id of each kept token, (K,) int64 each, for counts of (N,)."""
        numbers = torch.arange(len(self.counts), device=self.counts.device)
        return numbers.repeat_interleave(self.counts), self.ids.long()

    def to(self, device: torch.device) -> KeptTokens:
        """Return a copy on the device."""
        at = {"device": device, "non_blocking": True}
        return KeptTokens(self.ids.to(**at), self.counts.to(**at))


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Token rows that are the input of a model, with a mask of the tokens to score."""

    prompt_ids: Tensor
    """(B, P) int64, padded on the left."""
    prompt_lengths: Tensor
    """(B,) int64."""
    response_ids: Tensor
    """(B, T) int64, padded on the right."""
    response_lengths: Tensor
    """(B,) int64."""
    response_mask: Tensor
    """(B, T) bool: True for the tokens that the policy sampled, or that it learns to imitate."""
    kept: KeptTokens | None = field(default=None, kw_only=True)
    """The tokens to which each softmax is restricted; None: all tokens everywhere."""
    images: tuple[tuple[RowImage, ...], ...] | None = field(default=None, kw_only=True)
    """(B) the images of each row, in order; None: no row has any."""
    experts: tuple[Tensor, ...] | None = field(default=None, kw_only=True)
    """(B) the experts that the engine chose for each token of a row but the last, (tokens - 1,
    width) int16 (`agentrl.engine.local.routers`); None: the model chooses its own."""


@dataclass(frozen=True, slots=True)
class Batch(TokenRows):
    """All rollouts of a step. Rows of a rollout are adjacent, and so are rollouts of a group."""

    rollout_logprobs: Tensor
    """(B, T) float32: the engine's logprobs of the sampled tokens; 0 elsewhere."""
    versions: Tensor
    """(B, T) int64: the policy version that sampled each token; -1 elsewhere."""
    token_rewards: Tensor
    """(B, T) float64: rewards of turns at the last sampled token of each turn, the rest of the
    rollout's reward at the end of its last turn. The sum over a rollout is its entry in
    `rewards`."""
    turn: Tensor
    """(B, T) int64: the turn of its rollout that sampled each token, numbered in order of time; -1
    elsewhere. The order of rows is not enough: a loop that spawned a conversation may continue in
    an earlier row."""
    rewards: Tensor
    """(R,) float64: the weighted total reward of each rollout, after the budget policy. In float32,
    a difference of 33 between rewards of 17 million would be rounded to 32."""
    rollout: Tensor
    """(B,) int64: the rollout of each row, ascending."""
    group: Tensor
    """(R,) int64: the group of each rollout, ascending."""
    train: Tensor
    """(R,) bool: False for a rollout that a budget policy masks; it is in neither loss nor
    baseline."""
    episodes: tuple[str, ...]
    """(R) the episode ids of the rollouts, for messages."""
    baseline: Tensor | None = None
    """(R,) float64: the reward of the greedy rollout of the same sample; None unless every group
    has one."""

    call_penalties: Tensor | None = None
    """(B, T) float64: the penalty of the tokens of failed calls (`tools.penalties`), 0 elsewhere;
    None if no call failed."""

    @property
    def action_mask(self) -> Tensor:
        """The sampled tokens of rollouts that train, (B, T) bool."""
        return self.response_mask & self.train[self.rollout][:, None]


@dataclass(frozen=True, slots=True)
class Targets:
    """The tensors that an algorithm computes from a batch: all that the loss needs.

    The loss of a mini-batch is the sum over its tokens of `weights` times the loss of the token.
    Values outside the batch's `action_mask` are never read. The losses convert all tensors to the
    precision of the logprobs.
    """

    advantages: Tensor
    """(B, T) float64."""
    weights: Tensor
    """(B, T) float64: aggregation mode, masks and the denominator of the whole mini-batch; 0 off
    the mask."""
    old_logprobs: Tensor | None
    """(B, T) float32: the trainer's at the start of the step. None if one mini-batch is the whole
    batch: then the first pass of the update gives the same numbers."""
    reference_logprobs: Tensor | None
    """(B, T) float32 of the reference policy; None without a KL term."""
    returns: Tensor | None
    """(B, T) float32, the targets of the critic; None without a critic."""
    values: Tensor | None
    """(B, T) float32: the critic's at the start of the step; None without a critic."""
    teacher_logprobs: Tensor | None = None
    """(B, T) float32 of the teacher; None without a teacher."""


NO_TURN_REWARDS = RewardConfig()
"""A section `reward` whose weights of turn and tool rewards are 0."""


def collate(
    groups: Sequence[Group], pad_id: int = 0, reward: RewardConfig = NO_TURN_REWARDS
) -> Batch:
    """Turn groups of scored trajectories into one batch.

    Args:
        groups: the groups of the step, in the order of their rows.
        pad_id: the padding token. No forward pass reads it.
        reward: the section `reward`: `turn_weight` is the weight of a turn's own reward in
            `Scored.reward`. This share is placed at the end of the turn, the rest at the end of the
            rollout's last turn. `tool_weight` is the same for rewards of tools.

    Raises:
        RunStopped: there is no rollout, or a reward or a logprob is not finite. Training on such a
            number would make the weights NaN without an error.
    """
    scored = [s for group in groups for s in group.scored]
    if not scored:
        raise RunStopped("all rollouts of this step were dropped: there is nothing to learn from")
    turn, tool = reward.turn_weight, reward.tool_weight
    weights = {"turn": turn, "scores": turn, "tool": tool}
    segments = [segment for s in scored for segment in s.trajectory.segments]
    prompts = [_tensor(s.prompt_ids) for s in segments]
    responses = [_tensor(s.response_ids) for s in segments]
    mask = _pad([_tensor(s.response_mask) for s in segments], 0).bool()
    batch = Batch(
        prompt_ids=_pad(prompts, pad_id, side="left").long(),
        prompt_lengths=torch.tensor([len(p) for p in prompts]),
        response_ids=_pad(responses, pad_id).long(),
        response_lengths=torch.tensor([len(r) for r in responses]),
        response_mask=mask,
        rollout_logprobs=_pad([_tensor(s.logprobs) for s in segments], 0.0),
        versions=_pad([_tensor(s.versions) for s in segments], -1).long(),
        token_rewards=_token_rewards(scored, weights, mask.shape),
        turn=_turns(scored, mask),
        rewards=torch.tensor([s.reward for s in scored], dtype=torch.float64),
        rollout=torch.tensor([r for r, s in enumerate(scored) for _ in s.trajectory.segments]),
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group.scored]),
        train=torch.tensor([not s.masked for s in scored]),
        episodes=tuple(s.trajectory.episode_id for s in scored),
        baseline=_baseline(groups),
        call_penalties=_call_penalties(scored),
        kept=_kept(segments),
        images=row_images([s.images for s in segments]),
        experts=_experts(segments),
    )
    _check(batch)
    return batch


def row_images(
    images: Sequence[tuple[RowImage, ...]],
) -> tuple[tuple[RowImage, ...], ...] | None:
    """Return `TokenRows.images` from the images of each row.

    Equal images become one object, which is sent once: rollouts of other processes have copies.
    """
    shared: dict[RowImage, RowImage] = {}
    rows = tuple([tuple([shared.setdefault(x, x) for x in row]) for row in images])
    return rows if any(rows) else None


def _kept(segments: Sequence[Segment]) -> KeptTokens | None:
    if not any(s.kept_ids for s in segments):
        return None
    counts = [s.kept_counts or token_array([0]) * len(s.response_ids) for s in segments]
    return KeptTokens(
        torch.cat([_tensor(s.kept_ids) for s in segments]), _pad([*map(_tensor, counts)], 0)
    )


def _experts(segments: Sequence[Segment]) -> tuple[Tensor, ...] | None:
    if not any(s.experts for s in segments):
        return None
    inputs = [len(s.prompt_ids) + len(s.response_ids) - 1 for s in segments]
    return tuple([_tensor(s.experts).view(n, -1) for s, n in zip(segments, inputs, strict=True)])


def _baseline(groups: Sequence[Group]) -> Tensor | None:
    """Return the greedy reward of each rollout's group, (R,); None if a group has none."""
    rewards = [group.greedy.reward for group in groups for _ in group.scored if group.greedy]
    if len(rewards) < sum(len(group.scored) for group in groups):
        return None
    return torch.tensor(rewards, dtype=torch.float64)


def _tensor(stream: array[int] | array[float]) -> Tensor:
    """Return a tensor over the array, without a copy and without one Python number per token."""
    dtype = {"f": torch.float32, "i": torch.int32, "h": torch.int16}[stream.typecode]
    return torch.frombuffer(stream, dtype=dtype) if stream else torch.empty(0, dtype=dtype)


def _pad(rows: list[Tensor], fill: float, side: str = "right") -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)


def _check(batch: Batch) -> None:
    for r in (~batch.rewards.isfinite()).nonzero().flatten().tolist():
        raise RunStopped(f"the reward of episode {batch.episodes[r]} is {batch.rewards[r].item()}")
    if batch.baseline is not None and not batch.baseline.isfinite().all():
        r = int((~batch.baseline.isfinite()).nonzero()[0])
        raise RunStopped(
            f"the reward of the greedy rollout in the group of episode {batch.episodes[r]} is"
            f" {batch.baseline[r].item()}"
        )
    for b in (batch.prompt_lengths == 0).nonzero().flatten().tolist():
        raise RunStopped(f"episode {batch.episodes[int(batch.rollout[b])]} has an empty prompt")
    sampled = batch.response_mask.any(1).tolist()  # The learner runs no other rows.
    if len({e.shape[1] for e in compress(batch.experts or (), sampled)}) > 1:
        raise RunStopped("the engine returned experts for some rows of this step only")
    check_logprobs(batch, batch.rollout_logprobs, batch.response_mask, "engine")
    check_images(batch, [f"episode {batch.episodes[r]}" for r in batch.rollout.tolist()])


def check_images(rows: TokenRows, names: Sequence[str]) -> None:
    """Check that each row has the placeholders of its images: one run for each, of its length.

    Args:
        rows: the rows.
        names: the name of each row, for the message.

    Raises:
        RunStopped: a row has other placeholders. Placeholders that were sampled are not counted.
    """
    for b, images in enumerate(rows.images or ()):
        runs = [len([*run]) for is_one, run in groupby(placeholders_of(rows, b).tolist()) if is_one]
        sizes = [image.tokens for image in images]
        if runs != sizes:
            raise RunStopped(
                f"{names[b]}: the images of a row have {sizes} tokens, but the row has {runs}"
                f" placeholders in sequence (token {images[0].token_id}). A chat template must"
                " write one placeholder for each image, with other tokens between them"
            )


def placeholders_of(rows: TokenRows, b: int) -> Tensor:
    """Return which tokens of a row are placeholders of its images, (L,) bool.

    Placeholders that the policy sampled are none.
    """
    prompt, response = int(rows.prompt_lengths[b]), int(rows.response_lengths[b])
    token = rows.images[b][0].token_id if rows.images and rows.images[b] else -1
    in_prompt = rows.prompt_ids[b, rows.prompt_ids.shape[1] - prompt :] == token
    in_response = (rows.response_ids[b] == token) & ~rows.response_mask[b]
    return torch.cat([in_prompt, in_response[:response]])


def check_logprobs(batch: Batch, logprobs: Tensor, mask: Tensor, source: str) -> None:
    """Check that logprobs are finite.

    Args:
        batch: has the episode ids, for the message.
        logprobs: (B, T).
        mask: (B, T) bool, the tokens to check.
        source: "engine" or "trainer".

    Raises:
        RunStopped: a logprob is not finite; the message names its episode and token.
    """
    not_finite = mask & ~logprobs.isfinite()
    for b, t in not_finite.nonzero().tolist():
        raise RunStopped(
            f"the {source}'s logprob of response token {t} of episode"
            f" {batch.episodes[int(batch.rollout[b])]} is {logprobs[b, t].item()}"
        )


def check_tokens(rows: TokenRows, vocabulary: int) -> None:
    """Check that the model has an embedding for every token.

    Without this check a GPU would fail with an unclear message.

    Raises:
        RunStopped: a token is outside of the vocabulary; the message names the first one's row.
    """
    width = rows.prompt_ids.shape[1]
    parts = {
        "prompt": (rows.prompt_ids, torch.arange(width) >= width - rows.prompt_lengths[:, None]),
        "response": (
            rows.response_ids,
            torch.arange(rows.response_ids.shape[1]) < rows.response_lengths[:, None],
        ),
    }
    for name, (ids, is_token) in parts.items():
        for b, t in (is_token & ((ids < 0) | (ids >= vocabulary))).nonzero()[:1].tolist():
            at = t - int((~is_token[b]).sum()) if name == "prompt" else t
            raise RunStopped(
                f"token {at} of the {name} of row {b} of the batch is {int(ids[b, t])}, but the"
                f" model has a vocabulary of {vocabulary} (0 to {vocabulary - 1}). Does the"
                " tokenizer belong to the model?"
            )
    if rows.kept is not None and not 0 <= rows.kept.ids.min() <= rows.kept.ids.max() < vocabulary:
        raise RunStopped(
            f"the engine kept the tokens {rows.kept.ids.min()} to {rows.kept.ids.max()}, but the"
            f" model has a vocabulary of {vocabulary}"
        )


def _turns(scored: Sequence[Scored], mask: Tensor) -> Tensor:
    """Return the turn of each sampled token, (B, T) int64; -1 elsewhere."""
    width, first = mask.shape[1] + 1, 0
    starts: list[int] = []
    ends: list[int] = []
    numbers: list[int] = []
    for s in scored:
        for k, turn in enumerate(s.trajectory.turns):
            row = (first + turn.segment) * width
            starts.append(row + turn.start)
            ends.append(row + turn.end)
            numbers.append(k + 1)
        first += len(s.trajectory.segments)
    changes, added = torch.zeros(len(mask) * width, dtype=torch.int32), torch.tensor(numbers)
    changes.index_add_(0, torch.tensor(starts, dtype=torch.int64), added.int())
    changes.index_add_(0, torch.tensor(ends, dtype=torch.int64), -added.int())
    turn = changes.view(len(mask), width).cumsum(1)[:, :-1] - 1
    return turn.masked_fill(~mask, -1)


def _token_rewards(
    scored: Sequence[Scored], weights: Mapping[str, float], shape: Sequence[int]
) -> Tensor:
    """Return the reward of each token, (B, T) float64."""
    rows, columns, values, first = token_array(), token_array(), array("d"), 0
    for s in scored:
        for (row, at), value in _placed_rewards(s, weights).items():
            rows.append(first + row)
            columns.append(at)
            values.append(value)
        first += len(s.trajectory.segments)
    rewards = torch.zeros(*shape, dtype=torch.float64)
    if values:
        rewards[_tensor(rows), _tensor(columns)] = torch.frombuffer(values, dtype=torch.float64)
    return rewards


def _placed_rewards(scored: Scored, weights: Mapping[str, float]) -> dict[tuple[int, int], float]:
    """Return the rewards of a rollout's tokens, by segment and index in its response.

    The part of the reward that no turn earned is placed at the end of the last turn, even if that
    turn is in a spawned conversation: all sampled tokens precede this position and contribute to
    that part. The reward of a turn without sampled tokens is placed there too. A rollout without
    sampled tokens has no token rewards.
    """
    segments, turns = scored.trajectory.segments, scored.trajectory.turns
    placed: dict[tuple[int, int], float] = {}
    ends = [(t.segment, _find_last_sampled(segments[t.segment], t.start, t.end)) for t in turns]
    rows = [(k, _find_last_sampled(s, 0, len(s.response_ids))) for k, s in enumerate(segments)]
    last = next((position for position in reversed([*rows, *ends]) if position[1] >= 0), None)
    if last is None:
        return placed
    assigned = 0.0
    for turn, end in zip(turns, ends, strict=True):
        earned = sum(weights.get(source, 0.0) * r for source, r in turn.rewards.items())
        if earned and end[1] >= 0:
            placed[end] = placed.get(end, 0.0) + earned
            assigned += earned
    if not math.isclose(scored.reward, assigned, rel_tol=1e-12):  # otherwise the rest is rounding
        placed[last] = placed.get(last, 0.0) + (scored.reward - assigned)
    return placed


def _call_penalties(scored: Sequence[Scored]) -> Tensor | None:
    """Return the penalty of each token for failed calls, (B, T); None if no call failed."""
    if not any(turn.penalties for s in scored for turn in s.trajectory.turns):
        return None
    rows = []
    for s in scored:
        penalties = [
            torch.zeros(len(x.response_ids), dtype=torch.float64) for x in s.trajectory.segments
        ]
        for turn in s.trajectory.turns:
            for start, end, price in turn.penalties:
                penalties[turn.segment][start:end] += price
        rows += penalties
    return _pad(rows, 0.0)


def _find_last_sampled(segment: Segment, start: int, end: int) -> int:
    """Return the last index in [start, end) that the policy sampled, or -1."""
    return next((i for i in range(end - 1, start - 1, -1) if segment.response_mask[i]), -1)


def count_mini_batches(rollouts: int, size: int) -> int:
    """Return the number of mini-batches of `size` rollouts in a batch; 1 if `size` is 0."""
    return max(1, math.ceil(rollouts / size)) if size else 1


def assign_mini_batches(rollouts: int, size: int) -> Tensor:
    """Return the mini-batch of each rollout, (R,) int64.

    Adjacent rollouts stay together, in mini-batches of sizes as equal as possible. Otherwise, if 65
    rollouts remained for mini-batches of 64, the step on the last rollout alone would count as much
    as the step on all others. The rows of a step are already shuffled, so no random number is
    needed.
    """
    return torch.arange(rollouts) * count_mini_batches(rollouts, size) // max(1, rollouts)
