"""Notes each file of the repository that this Python opens, in the file named by READS.

A Python that starts with this folder on its path imports this by itself; the one that runs the
tests does so by name.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
SEEN: set[str] = set()


def note(event: str, arguments: tuple) -> None:
    """An audit hook: opening a file is one of the events that Python tells of."""
    if event != "open" or not isinstance(arguments[0], str):
        return
    path = os.path.abspath(arguments[0])
    writes = isinstance(arguments[1], str) and arguments[1][0] in "wax"
    if path in SEEN or writes or not path.startswith(ROOT):
        return
    if os.path.isfile(path):  # not a name in an open folder, which has no path here
        SEEN.add(path)
        with open(LOG, "a") as file:  # a fork that becomes a program has closed all others
            file.write(f"{path.removeprefix(ROOT)}\n")


if LOG := os.environ.get("READS"):
    sys.addaudithook(note)
