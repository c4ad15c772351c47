"""What a rollout costs for being nearly too long."""

from __future__ import annotations


def overlong(sampled: int, limit: int, buffer: int, penalty: float) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), times `penalty`.

        0                                            up to limit - buffer sampled tokens
        -penalty * (sampled - (limit - buffer)) / buffer     within the buffer
        -penalty                                     from limit on

    Args:
        sampled: tokens that the policy sampled: what tools and users said is not its doing.
        limit: tokens that cost the whole penalty.
        buffer: the last so many of them cost a share; at least 1.
        penalty: at least 0.
    """
    over = sampled - (limit - buffer)
    return -penalty * min(over / buffer, 1.0) if over > 0 else 0.0
