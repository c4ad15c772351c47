"""Run a script that imports verl, where verl is not installed.

    python -m agentrl.compat.verl gsm8k_multiturn_w_tool.py --local_save_dir data
    python -m agentrl.compat.verl -m pytest test_gsm8k_interaction.py

It takes the arguments of `python`. Imports of verl find agentrl's stand-ins, as in files of
a run. An installed verl is used instead.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from agentrl.compat.verl import stand_in
from agentrl.errors import AgentRLError


def main() -> None:
    """Run the script or, after `-m`, the module that the command line names."""
    del sys.argv[0]
    is_module = sys.argv[:1] == ["-m"]
    if len(sys.argv) <= is_module:
        sys.exit(f"usage: {__doc__}")
    name = sys.argv[is_module]
    if not is_module and not Path(name).is_file():
        sys.exit(f"error: no such file: {name}")
    stand_in()
    try:
        if is_module:
            del sys.argv[0]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            # As `python SCRIPT` does, so that the current folder hides no package.
            sys.path[0] = str(Path(name).resolve().parent)
            runpy.run_path(name, run_name="__main__")
    except AgentRLError as e:
        sys.exit(f"error: {e}")
    except ModuleNotFoundError as e:
        sys.exit(f"error: {name} imports {e.name}, which is not installed: pip install {e.name}")


if __name__ == "__main__":
    main()
