"""Context parallelism: ranks share the tokens of each row, so rows may be longer than a GPU holds.

    tokens          0 1 2 3 4 5 6 7       rank 0 has 0 2 4 6, rank 1 has 1 3 5 7
    attention       all tokens on both ranks, half of the heads on each
    loss            the logprobs of all tokens on both ranks

All layers but attention treat each token alone. Attention exchanges tokens for heads before, and
heads for tokens after (DeepSpeed-Ulysses, arXiv 2309.14509): each rank then has all tokens of its
heads, and attention over packed rows works as on one rank. Adjacent tokens are on different ranks,
because prompts have no loss: otherwise one rank would compute most of the logits.

Losses may combine the tokens of a row. So each rank computes the whole loss; the logprobs of its
own tokens have a gradient, the others have none. The gradients are summed over all ranks anyway
(`sharding.py`), and that sum is the gradient of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that run the same rows."""

    group: dist.ProcessGroup
    size: int
    rank: int
    """The number of this rank among them."""

    def all_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Exchange this rank's tokens of all heads for all tokens of some heads.

        Key-value heads are repeated if there are fewer of them than ranks.

        Args:
            query: (1, heads, L / size, d).
            key: (1, key-value heads, L / size, d).
            value: (1, key-value heads, L / size, e).

        Returns:
            All three with heads / size and L.

        Raises:
            NotImplementedError: the heads cannot be divided by the ranks.
        """
        copies = count_copies(query.shape[1], key.shape[1], self.size)
        if copies > 1:
            key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
        return tuple(map(self._all_tokens, (query, key, value)))

    def _all_tokens(self, x: Tensor) -> Tensor:
        received = self._exchange(x[0].unflatten(0, (self.size, -1)))  # (rank, head, token, d)
        return received.permute(1, 2, 0, 3).flatten(1, 2)[None]

    def all_heads(self, x: Tensor) -> Tensor:
        """Exchange back: (1, L, heads / size, e) for this rank's (1, L / size, heads, e)."""
        received = self._exchange(x[0].unflatten(0, (-1, self.size)).transpose(0, 1))
        return received.transpose(0, 1).flatten(1, 2)[None]

    def own_heads(self, numbers: Tensor) -> Tensor:
        """Return those of this rank among numbers of all heads, (heads,)."""
        return numbers.unflatten(0, (self.size, -1))[self.rank]

    def join(self, own: Tensor, is_own: Tensor) -> Tensor:
        """Return the numbers of all ranks, (N,). Those of this rank have a gradient.

        Args:
            own: (n,) the numbers of this rank.
            is_own: (N,) bool: their places.
        """
        numbers = own.new_zeros(is_own.shape).masked_scatter(is_own, own.detach())
        dist.all_reduce(numbers, group=self.group)
        return numbers.masked_scatter(is_own, own)

    def _exchange(self, x: Tensor) -> Tensor:
        """Send x[i] to rank i, and return what each rank has sent."""
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)


def count_copies(heads: int, shared: int, ranks: int) -> int:
    """Return how often key-value heads are repeated so that ranks can share them.

    Args:
        heads: the heads of queries.
        shared: the key-value heads.
        ranks: the number of ranks.

    Raises:
        NotImplementedError: the heads cannot be divided by the ranks.
    """
    copies = math.lcm(shared, ranks) // shared
    if heads % (shared * copies):
        raise NotImplementedError(
            f"its attention has {heads} heads and {shared} key-value heads, which {ranks} ranks"
            " cannot share evenly"
        )
    return copies


@cache
def open_context(size: int, device: str) -> ContextGroup | None:
    """Return the ranks that run the same rows as this one: `size` consecutive ones; None for 1.

    A learner of one rank, which computes the steps of a run again for example, shares no rows. All
    ranks call it at once.

    Args:
        size: divides the number of ranks.
        device: cpu or cuda.
    """
    if size == 1 or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    mesh = init_device_mesh(device, (dist.get_world_size() // size, size))
    return ContextGroup(mesh.get_group(1), size, mesh.get_local_rank(1))
