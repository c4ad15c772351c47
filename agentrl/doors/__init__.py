"""Doors: environments, tasks and agents of other projects, each by an adapter.

door.py      `Door`, one adapter; where it is found, and the Python of its package
program.py   the process in which a door's package runs
episodes.py  environments and agent loops of such a process
programs/    what runs in that process. These files import nothing of agentrl

The other modules are the doors, one each. A package may bring others by the entry-point group
`agentrl.doors`: the name of an entry point is the door's, its object is a `Door`.
"""

from __future__ import annotations

from agentrl.doors.door import Door, find_door, load, rows_file

__all__ = ["Door", "find_door", "load", "rows_file"]
