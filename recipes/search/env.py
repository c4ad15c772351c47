"""The passages that the tool `search` searches. The rewards are those of recipes/mix."""

from pathlib import Path

from agentrl.registry import load_file

FOLDER = Path(__file__).parent
load_file(str(FOLDER.parent / "mix/env.py"))
load_file("shelf:search").use_corpus(FOLDER / "corpus.jsonl")
