"""Log each file of the repository that this process opens to the file that READS names.

A Python process imports this module when it starts, if this folder is in PYTHONPATH. The
process of pytest imports it explicitly.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
SEEN: set[str] = set()


def log_open(event: str, arguments: tuple) -> None:
    """Log the path of an opened file. Python calls this audit hook for each event."""
    if event != "open" or not isinstance(arguments[0], str):
        return
    path = os.path.abspath(arguments[0])
    writes = isinstance(arguments[1], str) and arguments[1][0] in "wax"
    if path in SEEN or writes or not path.startswith(ROOT):
        return
    # a name relative to an open folder is no file here, because its path is not known
    if os.path.isfile(path):
        SEEN.add(path)
        # open the log each time, because a fork that runs a program closes all open files
        with open(LOG, "a") as file:
            file.write(f"{path.removeprefix(ROOT)}\n")


if LOG := os.environ.get("READS"):
    sys.addaudithook(log_open)
