"""The engine of the book: finds what can run, runs it, compares it, records it, renders it.

Read in this order; each module is one noun:

- ``transcript``  what a program printed, where, and when two such outputs are the same
- ``embeds``      the ``--8<--`` lines of a chapter and the program text they stand for
- ``runner``      one command, in an empty folder, with a time limit, leaving nothing behind
- ``warm``        the same command from a process that has torch already (``pytest --warm``)
- ``program``     a program and its transcripts: what must be true of them
- ``fences``      the code blocks of a chapter and what checks each language
- ``passed``      what has passed already and need not run again
- ``plugin``      how pytest sees all that
- ``data``, ``markdown``, ``mathematics``, ``notebooks``, ``glossary``, ``tracks``,
  ``references``, ``quiz``, ``site``, ``theme``  how the reader sees it

Everything up to ``plugin`` needs only pytest, pytest-codeblocks and the standard library at
import time, so that the book also runs on a machine where nothing can be installed.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class BookError(Exception):
    """Something in the book must be mended; the message says which file, line and command."""
