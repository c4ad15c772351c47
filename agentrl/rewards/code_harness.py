"""Runs a program on many inputs, inside the sandbox; sent there as text, imports nothing of ours.

Reads from stdin, as JSON, a mapping `solution`, `inputs`, `fn_name` ("" for a program that reads
and prints), `seconds` for each input, `most` bytes of output, and `all`: whether to go on after an
input that ended badly. Prints a line that it is there, and then for each input a line of JSON:
index, how it ended ("", "time", "crash", "output"), and what came out in base64.

Each input has a process of its own, forked from this one, which has imported what solutions may
use unasked. It writes into a pipe, never to the stdout of this process. Nothing here knows what
should come out: a program that fools all of this has still to name the right answers.
"""

# ruff: noqa: F403, F405
# What a solution may use without an import, as in verl's judge of the same data.
import bisect
import collections
import copy
import datetime
import functools
import heapq
import itertools
import json
import math
import operator
import os
import random
import re
import select
import signal
import string
import sys
import threading
import time
from base64 import b64encode

STARS = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
    "statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing",
)  # fmt: skip
"""Modules whose names a solution finds without an import; a later one's win."""
