"""The loop of an agent that has a client and no framework.

Arguments: trim removes its first turn from the history; summarize goes on from a summary of the
history; with helpers, a conversation of its own answers each call, at the same time as others.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from calculator import PROMPT, evaluate


def play(ask, write_results, prompt=PROMPT):
    """Play a conversation; return the last text.

    Args:
        ask: sends the history; returns what is added to it, the id and the expression of each call,
            and the text.
        write_results: returns what is added to the history for ids and results.
        prompt: the first message.
    """

    def answer_call(call):
        if "helpers" not in sys.argv or prompt != PROMPT:
            return call[0], evaluate(call[1])
        return call[0], play(ask, write_results, f"You are a helper. How much is {call[1]}?")

    history, ends = [{"role": "user", "content": prompt}], []
    while True:
        items, calls, text = ask(history)
        history += items
        if not calls:
            return text
        with ThreadPoolExecutor() as pool:
            history += write_results([*pool.map(answer_call, calls)])
        ends.append(len(history))
        if "trim" in sys.argv and len(ends) == 2:
            del history[1 : ends[0]]
        if "summarize" in sys.argv:
            request = {"role": "user", "content": "Summarize the conversation."}
            _, _, summary = ask([*history, request])
            history = [{"role": "user", "content": f"{prompt}\nSummary: {summary}"}]
