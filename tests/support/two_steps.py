"""An exact problem: policies over the nine sequences of two tokens from a vocabulary of three.

A policy has twelve logits: three for the first token, and three for the second token after each
first token.
"""

import torch


def draw(seed):
    """Return the twelve logits of a random policy."""
    return torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logprobs(theta):
    """Return (9, 2) logprobs: of both tokens of every sequence."""
    first, second = theta[:3].log_softmax(0), theta[3:].view(3, 3).log_softmax(1)
    return torch.stack([first[:, None].expand(3, 3), second], -1).view(9, 2)


def steps(logprobs):
    """Return (3,) logprobs of the first token, and (3, 3) of the second token after each first."""
    table = logprobs.view(3, 3, 2)
    return table[:, 0, 0], table[:, :, 1]


MASK = torch.ones(9, 2, dtype=torch.bool)


def expected_gradient(loss, theta, sampler=None):
    """Return the expected gradient (12,) of a loss over sequences that a policy samples.

    `sampler` has that policy's logprobs (9, 2); by default `theta` itself samples. `loss` maps
    logprobs (9, 2) to the loss of each token.
    """
    theta = theta.clone().requires_grad_()
    log_p = logprobs(theta)
    drawn = (log_p if sampler is None else sampler).detach().sum(1).exp()
    (drawn[:, None] * loss(log_p)).sum().backward()
    return theta.grad


def exact_gradient(objective, theta):
    """Return the gradient (12,) of a function of all logprobs (9, 2)."""
    theta = theta.clone().requires_grad_()
    objective(logprobs(theta)).backward()
    return theta.grad
