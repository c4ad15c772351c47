"""The number of examples that hypothesis tries."""

from hypothesis import settings


def examples(count: int) -> settings:
    """Return settings with `count` examples for `make test-all`, and fewer for `make test`.

    `count` is scaled by the `max_examples` of the profile in use (`tests/conftest.py`).
    """
    return settings(max_examples=max(5, count * settings.default.max_examples // 100))
