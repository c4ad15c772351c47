"""A world small enough to enumerate: all nine sequences of two tokens of three.

A policy is twelve numbers: the logits of the first token and, after each first token, those of the
second. So it matters where the first one leads.
"""

import torch


def draw(seed):
    """A policy's twelve logits."""
    return torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logprobs(theta):
    """(9, 2) of both tokens of every sequence."""
    first, second = theta[:3].log_softmax(0), theta[3:].view(3, 3).log_softmax(1)
    return torch.stack([first[:, None].expand(3, 3), second], -1).view(9, 2)


def steps(logprobs):
    """(3,) of the first token, and (3, 3) of the second after each of them."""
    table = logprobs.view(3, 3, 2)
    return table[:, 0, 0], table[:, :, 1]


MASK = torch.ones(9, 2, dtype=torch.bool)


def expected_gradient(loss, theta, sampler=None):
    """What the average over sequences converges to that `sampler` (9, 2) draws, or theta itself.

    `loss` maps logprobs (9, 2) to the loss of each token.
    """
    theta = theta.clone().requires_grad_()
    log_p = logprobs(theta)
    drawn = (log_p if sampler is None else sampler).detach().sum(1).exp()
    (drawn[:, None] * loss(log_p)).sum().backward()
    return theta.grad


def exact_gradient(objective, theta):
    """Of a function of all logprobs (9, 2)."""
    theta = theta.clone().requires_grad_()
    objective(logprobs(theta)).backward()
    return theta.grad
