"""From trajectories to tensors, and which of them an optimizer step is made of.

Shapes, here and in all of `agentrl.trainer`:

    B  segments (token rows); a rollout whose history was edited has several
    T  response tokens, sampled and observed, padded on the right
    P  prompt tokens, padded on the left
    R  rollouts
    G  groups: the rollouts of one sample
    V  vocabulary
    N  chosen tokens of some rows, flat: what the policy sampled and the loss looks at

Baselines, rewards and metrics count rollouts; only here they become segments, and each sampled
token stands in exactly one row. A step's mini-batches (one optimizer step each) are fixed first, by
rollouts; only then are they cut into micro-batches by a budget of tokens (`packing.py`), which
changes nothing but memory: the loss is a sum whose weights hold the mini-batch's denominator.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.errors import RunStopped
from agentrl.trajectory import Group, Scored, Segment, Trajectory


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Tokens that a model is run on, and those among them that it is asked about."""

    prompt_ids: Tensor
    """(B, P) int64, padded on the left."""
    prompt_lengths: Tensor
    """(B,) int64."""
    response_ids: Tensor
    """(B, T) int64, padded on the right."""
    response_lengths: Tensor
    """(B,) int64."""
    response_mask: Tensor
    """(B, T) bool: True exactly where the policy sampled the token, or is to."""


@dataclass(frozen=True, slots=True)
class Batch(TokenRows):
    """All rollouts of a step. Rows of one rollout are neighbours, rollouts of one group as well."""

    rollout_logprobs: Tensor
    """(B, T) float32: the engine's, of the sampled tokens; 0 elsewhere."""
    versions: Tensor
    """(B, T) int64: the policy version that sampled each token; -1 elsewhere."""
    token_rewards: Tensor
    """(B, T) float64: turn rewards on each turn's last sampled token, the rest of the rollout's
    reward where its own conversation ends. Their sum over a rollout is its entry in `rewards`."""
    turn: Tensor
    """(B, T) int64: which of its rollout's turns sampled each token, counted in the order in which
    they were taken; -1 elsewhere. Rows alone do not tell: a loop that spawned a conversation may go
    on in a row before it."""
    rewards: Tensor
    """(R,) float64: the weighted total of each rollout, budget policy included. In float32 a
    difference of 0.25 between rewards of 17 million would be lost."""
    rollout: Tensor
    """(B,) int64: which rollout a row belongs to, ascending."""
    group: Tensor
    """(R,) int64: which group a rollout belongs to, ascending."""
    train: Tensor
    """(R,) bool: False for a rollout that a budget policy masks: out of loss and baseline."""
    episodes: tuple[str, ...]
    """(R) the rollouts' episode ids, for messages."""
    baseline: Tensor | None = None
    """(R,) float64: what the greedy rollout of the same sample earned; None where not every group
    has one."""

    call_penalties: Tensor | None = None
    """(B, T) float64: what the tokens of calls that failed cost (`tools.penalties`), 0 elsewhere;
    None where no call did."""

    @property
    def action_mask(self) -> Tensor:
        """(B, T) bool: the sampled tokens of rollouts that train."""
        return self.response_mask & self.train[self.rollout][:, None]


@dataclass(frozen=True, slots=True)
class Targets:
    """What an algorithm makes of a batch: all that the loss needs.

    The loss of a mini-batch is the sum over its tokens of `weights` times the token's loss. What
    stands outside the batch's `action_mask` is never read. The losses take all in the precision of
    the logprobs.
    """

    advantages: Tensor
    """(B, T) float64."""
    weights: Tensor
    """(B, T) float64: aggregation, masks and the whole mini-batch's denominator; 0 off the mask."""
    old_logprobs: Tensor | None
    """(B, T) float32: the trainer's at the start of the step. None where one mini-batch is all of
    the batch: its first pass finds the same numbers on its way."""
    reference_logprobs: Tensor | None
    """(B, T) float32 of the reference policy, or None where no KL loss is wanted."""
    returns: Tensor | None
    """(B, T) float32 the critic learns, or None without one."""
    values: Tensor | None
    """(B, T) float32: the critic's at the start of the step, or None without one."""


def collate(
    groups: Sequence[Group], pad_id: int, *, turn_weight: float = 0.0, tool_weight: float = 0.0
) -> Batch:
    """Flatten groups of scored trajectories into one batch.

    Args:
        groups: the step's groups, in the order of their rows.
        pad_id: fills what is no token.
        turn_weight: what a turn's own reward counts in `Scored.reward`: that share is paid where
            the turn ends, all else where the loop's own conversation ends.
        tool_weight: the same for rewards of tools.

    Raises:
        RunStopped: no rollout at all; or a reward or a logprob that is not finite, which would
            silently spoil the weights.
    """
    scored = [s for group in groups for s in group.scored]
    if not scored:
        raise RunStopped("no rollout survived this step: there is nothing to learn from")
    weights = {"turn": turn_weight, "tool": tool_weight}
    segments = [segment for s in scored for segment in s.trajectory.segments]
    rewards_per_token = [row for s in scored for row in _token_rewards(s, weights)]
    turns = [row for s in scored for row in _turns(s.trajectory)]
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
        token_rewards=_pad(
            [torch.tensor(row, dtype=torch.float64) for row in rewards_per_token], 0.0
        ),
        turn=_pad(turns, -1).masked_fill(~mask, -1),
        rewards=torch.tensor([s.reward for s in scored], dtype=torch.float64),
        rollout=torch.tensor([r for r, s in enumerate(scored) for _ in s.trajectory.segments]),
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group.scored]),
        train=torch.tensor([not s.masked for s in scored]),
        episodes=tuple(s.trajectory.episode_id for s in scored),
        baseline=_baseline(groups),
        call_penalties=_call_penalties(scored),
    )
    _check(batch)
    return batch


def _baseline(groups: Sequence[Group]) -> Tensor | None:
    """(R,) of each rollout its group's greedy reward; None where one has none."""
    rewards = [group.greedy.reward for group in groups for _ in group.scored if group.greedy]
    if len(rewards) < sum(len(group.scored) for group in groups):
        return None
    return torch.tensor(rewards, dtype=torch.float64)


def _tensor(stream: array[int] | array[float]) -> Tensor:
    """A token stream without a copy, and without a Python number per token."""
    dtype = torch.float32 if stream.typecode == "f" else torch.int32
    return torch.frombuffer(stream, dtype=dtype) if stream else torch.empty(0, dtype=dtype)


def _pad(rows: list[Tensor], fill: float, side: str = "right") -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=fill, padding_side=side)


def _check(batch: Batch) -> None:
    for r in (~batch.rewards.isfinite()).nonzero().flatten().tolist():
        raise RunStopped(f"the reward of episode {batch.episodes[r]} is {batch.rewards[r].item()}")
    if batch.baseline is not None and not batch.baseline.isfinite().all():
        r = int((~batch.baseline.isfinite()).nonzero()[0])
        raise RunStopped(
            f"the reward of the greedy rollout beside episode {batch.episodes[r]} is"
            f" {batch.baseline[r].item()}"
        )
    for b in (batch.prompt_lengths == 0).nonzero().flatten().tolist():
        raise RunStopped(f"episode {batch.episodes[int(batch.rollout[b])]} has an empty prompt")
    check_logprobs(batch, batch.rollout_logprobs, batch.response_mask, "engine")


def check_logprobs(batch: Batch, logprobs: Tensor, mask: Tensor, whose: str) -> None:
    """No NaN and no infinity among logprobs.

    Args:
        batch: says which episode a row is of.
        logprobs: (B, T).
        mask: (B, T) bool, the tokens to look at.
        whose: "engine" or "trainer".

    Raises:
        RunStopped: names the first one's episode and token.
    """
    not_finite = mask & ~logprobs.isfinite()
    for b, t in not_finite.nonzero().tolist():
        raise RunStopped(
            f"the {whose}'s logprob of response token {t} of episode"
            f" {batch.episodes[int(batch.rollout[b])]} is {logprobs[b, t].item()}"
        )


def check_tokens(rows: TokenRows, vocabulary: int) -> None:
    """No token that the model has no embedding of: a GPU would die of it without a word.

    Raises:
        RunStopped: names the first one's row.
    """
    wide = rows.prompt_ids.shape[1]
    parts = {
        "prompt": (rows.prompt_ids, torch.arange(wide) >= wide - rows.prompt_lengths[:, None]),
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
                f" model has a vocabulary of {vocabulary} (0 to {vocabulary - 1}). Are tokenizer"
                " and model of one family?"
            )


def _turns(trajectory: Trajectory) -> list[Tensor]:
    """One tensor per segment: which turn each token lies in, or -1."""
    which = [torch.full((len(segment.response_ids),), -1) for segment in trajectory.segments]
    for k, turn in enumerate(trajectory.turns):
        which[turn.segment][turn.start : turn.end] = k
    return which


def _token_rewards(scored: Scored, weights: Mapping[str, float]) -> list[list[float]]:
    """Where a rollout's reward is paid: one list of floats per segment.

    What no turn earned is paid at the end of the last turn, also where that was spawned: all that
    was sampled came before it, and has its share in it. What no sampled token can carry (a turn
    without any) goes there, too; a rollout without sampled tokens carries nothing.
    """
    segments, turns = scored.trajectory.segments, scored.trajectory.turns
    rewards_per_token = [[0.0] * len(segment.response_ids) for segment in segments]
    ends = [(t.segment, _find_last_sampled(segments[t.segment], t.start, t.end)) for t in turns]
    places = [
        (k, _find_last_sampled(row, 0, len(row.response_ids))) for k, row in enumerate(segments)
    ]
    last = next((place for place in reversed([*places, *ends]) if place[1] >= 0), None)
    if last is None:
        return rewards_per_token
    assigned = 0.0
    for turn, (row, at) in zip(turns, ends, strict=True):
        earned = sum(weights.get(source, 0.0) * r for source, r in turn.rewards.items())
        if earned and at >= 0:
            rewards_per_token[row][at] += earned
            assigned += earned
    rewards_per_token[last[0]][last[1]] += scored.reward - assigned
    return rewards_per_token


def _call_penalties(scored: Sequence[Scored]) -> Tensor | None:
    """(B, T) what each token pays for the calls it helped to write; None where none failed."""
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
    """The last index in [start, end) that the policy sampled, or -1."""
    return next((i for i in range(end - 1, start - 1, -1) if segment.response_mask[i]), -1)


def count_mini_batches(rollouts: int, size: int) -> int:
    """How many optimizer steps one epoch over `rollouts` takes; size 0 means all in one."""
    return max(1, math.ceil(rollouts / size)) if size else 1


def assign_mini_batches(rollouts: int, size: int) -> Tensor:
    """(R,) int64: which mini-batch each rollout is in.

    Neighbours stay together, in shares as equal as can be: where dropped rollouts leave 65 for
    mini-batches of 64, a step on one lone rollout would count as much as one on all the others. The
    rows of a step come shuffled already, so no random number is needed.
    """
    return torch.arange(rollouts) * count_mini_batches(rollouts, size) // max(1, rollouts)
