"""Transcripts: the commands of a program, what they printed, and where that was recorded.

A transcript is a text file beside its program::

    # recorded 2026-11-21 on 2 CPU cores (x86_64), torch 2.13.0, Python 3.11.7, in 4.1 s
    $ torchrun --nproc-per-node=4 ring_all_reduce.py
    64.0 MiB reduced over 4 ranks
    ring ≈0.21 s
    $ torchrun --nproc-per-node=4 ring_all_reduce.py --broken
    RuntimeError: what the program printed
    [exit status 1]

The first line is the provenance. If it was recorded on a GPU, it may end with the clock of the
GPU: ``, SM clock 1410 to 1980 of 1980 MHz, lowered by power limit``. A ``$`` line is a command:
what the reader types, what is run and what was recorded. ``[exit status N]`` under a command
says that it leaves with N.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field

from worldsize.model import BookError

TIMING_FACTOR = 500  # between a measured number here and on another, busy machine
PERCENTAGE_FACTOR = 50  # the same for a measured percentage
EXACT_FACTOR = 1.5  # between two numbers after ≈ that do not depend on the machine
ROUNDING_FACTOR = 10  # the same for a number like 3e-7, which is a sum of rounding errors
GPU_TIMING_FACTOR = 1.5  # between two measured numbers on the same kind of GPU
GPU_RATIO_FACTOR = 1.1  # the same for a number before × or %
FLOAT32 = 1e-6  # relative; more digits than float32 has differ from machine to machine

_WHOLE = r"\d+(?:[,_]\d{3})*"
_NUMBER = rf"[-+]?{_WHOLE}(?:\.\d+)?(?:[eE][-+]?\d+)?"
APPROXIMATE = re.compile(rf"≈ *(?:{_NUMBER}|[-+]?(?:nan|inf)\b)(%| ?×|)")
_DECIMAL = re.compile(
    rf"(?<![\w.])[-+]?(?:{_WHOLE}\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)(?![\w.]*\.\d)"
)
NPROC = re.compile(r"(--nproc[-_]per[-_]node[= ])(\d+)")
_STATUS = re.compile(r"^\[exit status (\d+)\]$")
_PROVENANCE = re.compile(
    r"^# recorded (?P<date>\d{4}-\d\d-\d\d) on (?P<device>.+), "
    r"torch (?P<torch>\S+), Python (?P<python>\S+), in (?P<seconds>[\d.]+) s"
    r"(?:, (?P<clocks>SM clock .+))?$"
)
_CLOCKS = re.compile(
    r"SM clock (?P<lowest>\d+)(?: to (?P<highest>\d+))? of (?P<maximum>\d+) MHz"
    r"(?:, lowered by (?P<reasons>.+))?"
)


@dataclass(frozen=True)
class Clocks:
    """The clock of the SMs in MHz, while the commands of a transcript used the GPU."""

    lowest: int
    highest: int
    maximum: int  # that this kind of GPU can reach
    reasons: tuple[str, ...] = ()  # why the clock was lowered, in words

    @classmethod
    def parse(cls, text: str) -> Clocks | None:
        """Read the end of a provenance line; None where it has another form."""
        match = _CLOCKS.fullmatch(text)
        if match is None:
            return None
        lowest, reasons = int(match["lowest"]), match["reasons"]
        highest = int(match["highest"] or lowest)
        words = tuple(reasons.split(" and ")) if reasons else ()
        return cls(lowest, highest, int(match["maximum"]), words)

    def __str__(self) -> str:
        first = f"{self.lowest} to " if self.lowest != self.highest else ""
        why = f", lowered by {' and '.join(self.reasons)}" if self.reasons else ""
        return f"SM clock {first}{self.highest} of {self.maximum} MHz{why}"


@dataclass(frozen=True)
class Provenance:
    """Where and when a transcript was recorded."""

    date: str
    device: str
    torch: str
    python: str
    seconds: float
    clocks: Clocks | None = None  # of the GPU; older recordings have none

    def __str__(self) -> str:
        clocks = f", {self.clocks}" if self.clocks else ""
        return (
            f"# recorded {self.date} on {self.device}, torch {self.torch}, "
            f"Python {self.python}, in {self.seconds:.1f} s{clocks}"
        )


@dataclass
class Command:
    """One command of a transcript: the line after ``$``, its output, its exit status."""

    command_line: str
    output: list[str] = field(default_factory=list)
    status: int = 0
    line: int = 1

    def lines(self) -> list[str]:
        """The command as it stands in the file, with all that belongs to it."""
        ending = [f"[exit status {self.status}]"] if self.status else []
        return [*f"$ {self.command_line}".split("\n"), *self.output, *ending]


@dataclass
class Transcript:
    """A whole transcript."""

    commands: list[Command]
    provenance: Provenance | None = None
    name: str = field(default="transcript", compare=False)  # its path, for messages

    @classmethod
    def parse(cls, text: str, name: str = "transcript", above: int = 0) -> Transcript:
        """Read a transcript of the file ``name``, in which ``above`` lines stand before it.

        Raises BookError with file and line where it is not one.
        """

        def wrong(message: str, number: int) -> BookError:
            return BookError(f"{name}:{above + number}: {message}")

        lines = text.rstrip("\n").split("\n") if text.strip() else []
        if not lines:
            raise wrong("the transcript is empty: write its `$ command` line", 1)
        provenance, commands = None, []
        if lines[0].startswith("# "):
            match = _PROVENANCE.match(lines[0])
            clocks = Clocks.parse(match["clocks"]) if match and match["clocks"] else None
            if match is None or (match["clocks"] and clocks is None):
                raise wrong("this is no `# recorded …` line", 1)
            parts = {"seconds": float(match["seconds"]), "clocks": clocks}
            provenance = Provenance(**match.groupdict() | parts)
        goes_on = False
        for number, line in enumerate(lines, 1):
            if provenance and number == 1:
                continue
            if goes_on:
                commands[-1].command_line += f"\n{line}"
            elif line.startswith("$ "):
                commands.append(Command(line[2:], line=number))
            elif not commands:
                raise wrong("output before the first `$ command` line", number)
            elif match := _STATUS.match(line):
                commands[-1].status = int(match[1])
            elif commands[-1].status:
                raise wrong("output after `[exit status …]`", number)
            else:
                commands[-1].output.append(line)
            goes_on = line.endswith("\\") and (goes_on or line.startswith("$ "))
        if not commands:
            raise wrong("no `$ command` line", 1)
        return cls(commands, provenance, name)

    def text(self) -> str:
        """The transcript as it stands in its file."""
        head = [str(self.provenance)] if self.provenance else []
        body = [line for command in self.commands for line in command.lines()]
        return "\n".join([*head, *body]) + "\n"


def output_lines(text: str) -> list[str]:
    """What a command printed, as lines without trailing blanks, fit to stand in a transcript.

    Raises ValueError where a line would be read back as something else.
    """
    lines = [re.sub(r".*\r(?=.)", "", line).rstrip() for line in text.rstrip().split("\n")]
    lines = [] if lines == [""] else lines
    for line in lines:
        if line.startswith("$ ") or _STATUS.match(line):
            raise ValueError(f"the output line {line!r} would read as a transcript's own line")
    return lines


@dataclass(frozen=True)
class Tolerances:
    """How far the numbers of an output may differ from those of a transcript.

    A number after ``≈`` that lies in a match of one of the patterns ``measured`` is a time, or
    depends on the machine in another way. All other numbers are the same on every machine.
    """

    measured: tuple[str, ...] = ()  # regular expressions, searched in each line
    compare_points: bool = True  # whether the curves of the figure must agree
    same_gpu: bool = False  # whether it ran on the kind of GPU that the transcript names

    def is_measured(self, line: str, position: int) -> bool:
        """Return whether the number at ``position`` of a line depends on the machine."""
        matches = (match for each in self.measured for match in re.finditer(each, line))
        return any(match.start() <= position < match.end() for match in matches)

    def allow(self, expected: re.Match, actual: re.Match) -> bool:
        """Return whether two numbers after ``≈`` agree; each is a match in its line."""
        pair = expected[0], actual[0]
        a, b = map(_value, pair)
        low, high = sorted((abs(a), abs(b)))
        if not (math.isfinite(low) and math.isfinite(high)):
            return str(low) == str(high)
        digit, ratio = min(map(_last_digit, pair)), bool(expected[1])
        measured = self.is_measured(expected.string, expected.start())
        if "e" in pair[0].lower() and (self.same_gpu or not measured):
            return abs(a - b) <= (ROUNDING_FACTOR - 1) * low + 2 * digit
        if self.same_gpu:
            factor = GPU_RATIO_FACTOR if ratio else GPU_TIMING_FACTOR
            return abs(a - b) <= (factor - 1) * low + digit
        if not measured:
            return abs(a - b) <= (EXACT_FACTOR - 1) * low + 2 * digit
        factor = PERCENTAGE_FACTOR if pair[0].endswith("%") else TIMING_FACTOR
        return high + digit <= factor * (low + digit)


EXACT = Tolerances()  # of a program that declares no measured numbers


def _shape(line: str) -> str:
    """Return the line without the numbers that may differ."""
    if "≈" in line:
        line = re.sub(r" +", " ", APPROXIMATE.sub(r"≈#\1", line))
        line = line.replace(" ≈#", "≈#").strip()
    return _DECIMAL.sub("#.#", line)


def same_line(expected: str, actual: str, tolerances: Tolerances = EXACT) -> bool:
    """Return whether two output lines agree.

    Text and integers must be equal. A decimal may differ by one unit of its last printed digit,
    because kernels for different instruction sets add in different orders. A number directly
    after ``≈`` may be 1.5 times larger or smaller; if the ``tolerances`` say that it was
    measured, `TIMING_FACTOR` times, and a percentage `PERCENTAGE_FACTOR` times. Differences are
    counted from the last digit, so that 0.0% is near 0.1% and far from 75%.
    """
    if expected == actual:
        return True
    if _shape(expected) != _shape(actual):
        return False
    decimals = zip(_decimals(expected), _decimals(actual), strict=True)
    approximate = zip(APPROXIMATE.finditer(expected), APPROXIMATE.finditer(actual), strict=True)
    return all(_same_decimal(*pair) for pair in decimals) and all(
        tolerances.allow(*pair) for pair in approximate
    )


def _same_decimal(expected: str, actual: str) -> bool:
    a, b = _value(expected), _value(actual)
    digit = min(_last_digit(expected), _last_digit(actual))
    return abs(a - b) <= max(1.001 * digit, FLOAT32 * max(abs(a), abs(b)))


def _last_digit(text: str) -> float:
    """Return one unit of the last digit of a number: 0.1 for 3.5, 1e-8 for 2.5e-7."""
    mantissa, _, exponent = text.rstrip("%× ").lower().partition("e")
    if exponent and not _value(text):
        return 1e-6  # an error of 0e+00 is none in float32
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def _value(text: str) -> float:
    return float(re.sub("[≈ ,_%×]", "", text))


def _decimals(line: str) -> list[str]:
    """Return the numbers of a line that are neither behind ``≈`` nor whole."""
    return _DECIMAL.findall(APPROXIMATE.sub("", line))


def difference(
    expected: list[str], actual: list[str], tolerances: Tolerances = EXACT
) -> list[str]:
    """Return a short diff between two outputs; it is empty if `same_line` accepts all lines."""
    shapes = [_shape(line) for line in expected], [_shape(line) for line in actual]
    matcher = difflib.SequenceMatcher(None, *shapes, autojunk=False)
    diff: list[str] = []
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        if kind == "equal":
            for a, b in zip(expected[a0:a1], actual[b0:b1], strict=True):
                if not same_line(a, b, tolerances):
                    diff += [f"- {a}", f"+ {b}"]
        else:
            diff += [f"- {line}" for line in expected[a0:a1]]
            diff += [f"+ {line}" for line in actual[b0:b1]]
    return diff if len(diff) <= 40 else [*diff[:40], f"  … and {len(diff) - 40} lines more"]
