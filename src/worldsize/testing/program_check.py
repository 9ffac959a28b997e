"""Run a program, compare it with its transcript, and report or record the differences.

`worldsize.execution.program_run` runs the commands, `worldsize.testing.compare` compares, and
`worldsize.testing.record` records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from worldsize.execution import gpu_clocks, runner, shared_gpu
from worldsize.execution.program_run import (
    RunOptions,
    RunResult,
    execute,
    gpu_lock,
    usable_launcher,
)
from worldsize.execution.requirements import gpus_needed
from worldsize.execution.staging import lab_files, required_files, stage_files, stage_program
from worldsize.model import BookError
from worldsize.model.program import Program, gpu_commands, gpu_kind
from worldsize.model.transcript import NPROC, Tolerances, Transcript
from worldsize.testing.compare import Mismatch, compare, compare_command
from worldsize.testing.record import has_listed_commands, record


@dataclass(frozen=True)
class CheckOptions(RunOptions):
    """Options for running commands, and whether a transcript that differs is recorded again."""

    record: bool = False


@dataclass
class CheckResult:
    """The outcome of a check that did not fail."""

    seconds: float = 0.0  # the duration of the commands
    recorded: bool = False
    # The output of a forked command differed, so all commands ran again in new interpreters.
    rerun_in_fresh_process: bool = False


def inputs(program: Program, device: str) -> tuple[str | Path, ...]:
    """Return the texts and files on which the outcome of `check` depends."""
    listed = "" if device == "cpu" else gpu_commands(program.root).get(program.name, "")
    texts = program.name, device, runner.describe_device(device), listed
    transcripts = map(
        program.transcript_path, [*program.devices, *program.older_transcripts.values()]
    )
    return (
        *texts,
        repr(program.tolerances),
        *required_files(program).values(),
        *transcripts,
        program.figure_path(device),
    )


def check(program: Program, device: str, options: CheckOptions) -> CheckResult:
    """Run the program's commands for ``device`` and compare them with its transcript.

    If a command was forked and something differs, all commands run again exactly as they are
    typed, and only this second run counts. With ``options.record``, a transcript and a figure
    that differ are written. On a GPU, the recorded commands come from snippets/gpu.toml. Raise
    BookError with file, line, command and a diff if something differs and was not recorded.
    """
    name = program.expected_device(device, runner.torch_version())
    transcript = _expected(program, device, name, options.record)
    tolerances = _tolerances(program, device, transcript)
    options = replace(options, device=device)
    with gpu_lock(device):
        run, mismatches = _run(program, transcript, tolerances, options)
        rerun_in_fresh_process = run.used_prefork and bool(mismatches)
        if rerun_in_fresh_process:
            as_typed = replace(options, launcher=None)
            run, mismatches = _run(program, transcript, tolerances, as_typed)
    if not all(mismatch.recordable for mismatch in mismatches):
        raise BookError("\n".join(mismatch.message for mismatch in mismatches))
    if options.record and (mismatches or _needs_provenance(run, transcript)):
        record(run, transcript, name)
        return CheckResult(
            run.seconds, recorded=True, rerun_in_fresh_process=rerun_in_fresh_process
        )
    if mismatches:
        make = "make record" if device == "cpu" else "make record-gpu"
        hint = f"if that is right: {make} WHAT={program.name}"
        raise BookError("\n".join([*(each.message for each in mismatches), hint]))
    return CheckResult(run.seconds, rerun_in_fresh_process=rerun_in_fresh_process)


def _expected(program: Program, device: str, name: str, recording: bool) -> Transcript:
    """Return the transcript ``name``, or the commands of snippets/gpu.toml without outputs."""
    recorded = program.transcript(name) if device in program.devices else None
    if recorded and (
        device == "cpu" or not recording or has_listed_commands(program, recorded)
    ):
        return recorded
    return replace(program.gpu_template, name=program.transcript_name(name))


def _tolerances(program: Program, device: str, transcript: Transcript) -> Tolerances:
    """Return the tolerances, which are narrower on the kind of GPU of the transcript.

    If ranks share a GPU, their times vary too much for the narrower tolerances.
    """
    recorded = transcript.provenance
    same_gpu = (
        device != "cpu"
        and recorded is not None
        and not shared_gpu.is_shared(recorded.device)
        and not shared_gpu.needs_sharing(gpus_needed(transcript))
        and gpu_kind(recorded.device) == gpu_kind(runner.describe_device(device))
    )
    return replace(program.tolerances, same_gpu=same_gpu)


def _run(
    program: Program, transcript: Transcript, tolerances: Tolerances, options: CheckOptions
) -> tuple[RunResult, list[Mismatch]]:
    """Execute the commands of a transcript and compare them with it.

    If a command was forked and its output differs, the following commands do not run. A
    recording on a GPU includes the clock of the GPU.
    """
    if options.device != "cpu":
        options = replace(options, launcher=None)
    if options.device != "cpu" and options.record:
        with gpu_clocks.Recorder() as recorder:
            run = execute(program, transcript.commands, options)
        run.clocks = recorder.result()
    else:
        run = execute(
            program,
            transcript.commands,
            options,
            is_wrong=lambda run, command, result: (
                run.used_prefork
                and compare_command(run, transcript.name, command, result, tolerances)
                is not None
            ),
        )
    return run, compare(run, transcript, tolerances)


def _needs_provenance(run: RunResult, transcript: Transcript) -> bool:
    """Return whether the transcript was never recorded, or lacks the clock that this run has.

    The clock and the numbers must be from the same run, so the whole transcript is recorded.
    """
    recorded = transcript.provenance
    return recorded is None or (run.clocks is not None and recorded.clocks is None)


def check_changed_source(
    program: Program, device: str, source: str, options: CheckOptions
) -> CheckResult | None:
    """Run the commands with a changed source of the program.

    Return None if nothing differs. A program with a grader is also graded like the file of a
    learner; the result is None only if the grader accepts it.
    """
    transcript = program.transcript(program.expected_device(device, runner.torch_version()))
    tolerances = program.tolerances
    options = replace(options, device=device)
    with gpu_lock(device):
        run = execute(
            program,
            transcript.commands,
            options,
            source=source,
            is_wrong=lambda run, command, result: (
                compare_command(run, transcript.name, command, result, tolerances) is not None
            ),
        )
    differs = bool(compare(run, transcript, tolerances))
    if not differs and list(program.root.glob(f"graders/*/{program.path.stem}.py")):
        differs = not _is_accepted(program, source, options)
    return CheckResult(run.seconds) if differs else None


def _is_accepted(program: Program, source: str, options: CheckOptions) -> bool:
    """Return whether the grader accepts a source as the submission of a learner."""
    with runner.empty_folder() as folder:
        stage_files(lab_files(program.root), folder)
        (folder / program.path.name).write_text(source, "utf-8")
        command_line = f"python labs/check.py {program.path.name}"
        result = runner.run(
            command_line, folder, limit=options.limit, launcher=options.launcher
        )
    return not result.status and not result.timed_out


def check_refusal(program: Program, options: CheckOptions) -> CheckResult:
    """Run a program that needs a GPU without one.

    Raise BookError unless it prints one sentence about this and exits with a non-zero status.
    """
    command = program.transcript("cuda").commands[0].command_line
    with runner.empty_folder() as folder:
        stage_program(program, folder)
        result = runner.run(command, folder, limit=options.limit, device="cpu")
    printed = [line for line in result.stderr.splitlines() if line.strip()]
    sentence = [line for line in printed if re.search(r"\b(GPU|CUDA|accelerator)s?\b", line)]
    traceback = any(line.startswith("Traceback") for line in printed)
    if result.status == 0 or not sentence or traceback:
        raise BookError(
            f"{program.name}:1: `{command}` needs a GPU. Without one, it must print one "
            f"sentence about this to stderr, without a traceback, and exit with a non-zero "
            f"status. It exited with status {result.status} and printed:\n"
            + "\n".join(printed[-8:])
        )
    return CheckResult(result.seconds)


def starts_ranks(program: Program) -> bool:
    """Return whether a successful command of the CPU transcript contains a number of ranks."""
    commands = program.transcript("cpu").commands if "cpu" in program.devices else []
    return any(not each.status and NPROC.search(each.command_line) for each in commands)


def check_ranks(program: Program, ranks: int, options: CheckOptions) -> CheckResult:
    """Run the successful commands of the CPU transcript with a different number of ranks.

    Raise BookError if a command hangs, or if it ends with a traceback of the program.
    """
    seconds = 0.0
    with runner.empty_folder() as folder:
        stage_program(program, folder)
        for number, command in enumerate(program.transcript("cpu").commands):
            if command.status:
                continue
            command_line = NPROC.sub(rf"\g<1>{ranks}", command.command_line)
            launcher = usable_launcher(options, program, command_line, number)
            result = runner.run(command_line, folder, limit=options.limit, launcher=launcher)
            seconds += result.seconds
            line = result.line_in(program.path.name)
            if result.timed_out or (result.status and line):
                raise BookError(
                    f"{program.name}:{line or 1}: `{command_line}` must work, or print one "
                    f"sentence about the ranks that it needs:\n{runner.explain(result)}"
                )
    return CheckResult(seconds)
