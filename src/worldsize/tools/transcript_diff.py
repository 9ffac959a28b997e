"""List the outputs that differ between two commits.

    PYTHONPATH=src python -m worldsize.tools.transcript_diff OLD NEW

The list is Markdown, with a diff for each command.
"""

from __future__ import annotations

import subprocess
import sys

from worldsize.model import ROOT, BookError
from worldsize.model.program import owning_program
from worldsize.model.transcript import DEFAULT_TOLERANCES, Command, Transcript, difference

FOLDERS = ("snippets/", "labs/", "assessment/")


def git(*words: str) -> str:
    """Return the output of a git command; raise BookError with git's message if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise BookError(done.stderr.strip())
    return done.stdout


def commands(commit: str, name: str) -> dict[str, Command]:
    """Return the commands of a transcript in a commit, by the command line."""
    found = Transcript.parse(git("show", f"{commit}:{name}"), name).commands
    return {each.command_line: each for each in found}


def changed(old: str, new: str) -> str:
    """Return, as Markdown, a diff for each command whose output differs between the commits."""
    parts = []
    for name in git("diff", "--name-only", "--diff-filter=M", old, new).split("\n"):
        if not (name.startswith(FOLDERS) and name.endswith(".txt")):
            continue
        before, after = commands(old, name), commands(new, name)
        program = owning_program(ROOT / name, ROOT)
        tolerances = program.tolerances if program else DEFAULT_TOLERANCES
        diff = []
        for command_line in filter(after.__contains__, before):
            lines = difference(
                before[command_line].lines()[1:], after[command_line].lines()[1:], tolerances
            )
            diff += [f"  $ {command_line}", *lines] if lines else []
        if diff:
            parts.append("\n".join([f"## {name}", "", "```diff", *diff, "```"]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(
            "give two commits: PYTHONPATH=src python -m worldsize.tools.transcript_diff OLD NEW"
        )
    try:
        print(changed(*sys.argv[1:]))
    except BookError as error:
        sys.exit(str(error))
