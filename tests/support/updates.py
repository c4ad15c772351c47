"""Makes weight updates from tensors of a test, and sends them to one server."""

from contextlib import closing
from weakref import WeakKeyDictionary

from agentrl.engine.base import Update
from agentrl.engine.remote.distributor import Distributor
from agentrl.engine.remote.senders import Route, WeightsSender

_distributors = WeakKeyDictionary()


def policy_of(learner, version):
    """Return an update to a learner's policy, as `Publisher` makes it."""
    return Update(version, learner.export, learner.ranks.send_weights)


def update(weights, version):
    """Return an update to these (name, tensor) pairs."""
    pairs = list(weights)
    return update_from(lambda: iter(pairs), version)


def update_from(weights, version):
    """Return an update to the (name, tensor) pairs that a function yields."""

    def send(route):
        with closing(WeightsSender()) as sender:
            return sender.send(weights(), route)

    return Update(version, weights, send)


def publish(engine, update):
    """Send an update to one server, as a pool does; return the number of bytes."""
    distributor = _distributors.setdefault(engine, Distributor())
    size, errors = distributor.send([engine], update)
    for error in errors.values():
        raise error
    return size


def sent_of(weights, folder=None):
    """Return what is known of these (name, tensor) pairs after sending them to no server."""
    return WeightsSender().send(weights, Route(1, folder=folder))
