"""The assistant turns that users write in their tests."""

from agentrl.chat import parse_hermes, parse_react
from agentrl.testing import call, react_call


def test_a_call_is_what_the_parser_reads():
    """A tool may have a parameter `name`."""
    for parse, text in (
        (parse_hermes, call("find_person", name="Ann", age=3)),
        (parse_react, react_call("find_person", name="Ann", age=3)),
    ):
        (parsed,) = parse(text)
        assert (parsed.name, parsed.arguments) == ("find_person", {"name": "Ann", "age": 3})
