"""Programs of ours that are sent into a box.

They import the standard library alone, of Python 3.8 or later: the box's interpreter runs them, and
nothing else is there.
"""
