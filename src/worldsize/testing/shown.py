"""Checks that a page of the book shows a program, its transcript and its figure."""

from __future__ import annotations

from worldsize.model import BookError, compatibility
from worldsize.model.program import GPU_COMMANDS, LAUNCH, Program, programs
from worldsize.testing.record import has_listed_commands


def check_shown(program: Program, embedded: dict[str, list[str]]) -> None:
    """Raise BookError unless the program has a transcript and a page shows both.

    ``embedded`` is the result of `page.embedded_files`. A lab is shown on its own page.
    """
    transcripts = program.transcripts()
    if not transcripts:
        if program.name.startswith("labs/") and _named_in_a_lab(program):
            return
        raise BookError(
            f"{program.name}:1: it has no transcript: write its commands, after `$ `, in "
            f"{program.transcript_path('cpu').name} and run `make record WHAT={program.name}`"
        )
    for device, transcript in transcripts.items():
        make = "make record" if device == "cpu" else "make record-gpu"
        if transcript.provenance is None:
            raise BookError(
                f"{program.transcript_name(device)}:1: it was never "
                f"recorded: `{make} WHAT={program.name}`"
            )
        if device != "cpu" and not has_listed_commands(program, transcript):
            raise BookError(
                f"{program.transcript_name(device)}:1: {GPU_COMMANDS} says other commands, or "
                f"none: change it, or `{make} WHAT={program.name}`"
            )
    newest = compatibility.newest_release(program.root)
    if program.older_transcripts and newest not in compatibility.releases(program):
        raise BookError(
            f"{program.name}:1: it prints something else on older releases of torch, and did "
            f"not run on {newest} as it is: `make test-torch-versions RELEASES={newest} "
            f"WHAT={program.name}`"
        )
    if program.name.startswith("labs/") and not program.name.startswith(LAUNCH):
        return
    if program.name not in embedded:
        raise BookError(f"{program.name}:1: no page of docs/ embeds it")
    if not any(program.transcript_name(device) in embedded for device in transcripts):
        raise BookError(
            f"{embedded[program.name][0]}: the page embeds {program.name} but no page embeds "
            f"its transcript"
        )
    if program.figure.exists():
        pages = (program.root / "docs").rglob("*.md")
        wanted = program.figure.relative_to(program.root).as_posix()
        if not any(wanted in page.read_text("utf-8") for page in pages):
            raise BookError(f"{program.name}:1: it draws {wanted}, which no page shows")


def _named_in_a_lab(program: Program) -> bool:
    """Return whether a command of a lab names a program of labs/launch/."""
    name = program.name.removeprefix(LAUNCH)
    labs = (other for other in programs(program.root) if other.name.startswith("labs/"))
    found = (transcript for other in labs for transcript in other.transcripts().values())
    return any(
        name in each.command_line for transcript in found for each in transcript.commands
    )
