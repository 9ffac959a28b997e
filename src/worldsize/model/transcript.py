"""Parse transcripts and compare outputs.

A transcript contains the commands of a program, their outputs, and the machine that recorded
them. It is a text file next to the program::

    # recorded 2026-11-21 on 2 CPU cores (x86_64), torch 2.13.0, Python 3.11.7, in 4.1 s
    $ torchrun --nproc-per-node=4 ring_all_reduce.py
    64.0 MiB reduced over 4 ranks
    ring ≈0.21 s
    $ torchrun --nproc-per-node=4 ring_all_reduce.py --broken
    RuntimeError: what the program printed
    [exit status 1]

The first line is the provenance. If the transcript was recorded on a GPU, this line may end
with the clock rate of the GPU:
``, SM clock 1410 to 1980 of 1980 MHz, lowered by power limit``. A line that starts with ``$``
is a command. The reader types it, and the tests run exactly the same command. The line
``[exit status N]`` follows the output of a command whose exit status is N and not 0.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field

from worldsize.model import BookError

# The largest factor between two numbers after ≈ that count as equal:
TIMING_FACTOR = 500  # for measured numbers, because the machines differ and may be busy
PERCENTAGE_FACTOR = 50  # for measured percentages
EXACT_FACTOR = 1.5  # for numbers that do not depend on the machine
ROUNDING_FACTOR = 10  # for numbers such as 3e-7, which are sums of rounding errors
GPU_TIMING_FACTOR = 1.5  # for numbers on the same kind of GPU
GPU_RATIO_FACTOR = 1.1  # for numbers before × or % on the same kind of GPU
FLOAT32 = 1e-6  # relative; further digits of a float32 number differ between machines

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
    """The clock rates of the SMs in MHz while the commands of a transcript used the GPU."""

    lowest: int
    highest: int
    maximum: int  # the highest rate that this kind of GPU can reach
    reasons: tuple[str, ...] = ()  # why the clock was lowered, in words

    @classmethod
    def parse(cls, text: str) -> Clocks | None:
        """Parse the clock rates in a provenance line; return None if they are not valid."""
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
    clocks: Clocks | None = None  # None for a CPU, and for older recordings on a GPU

    def __str__(self) -> str:
        clocks = f", {self.clocks}" if self.clocks else ""
        return (
            f"# recorded {self.date} on {self.device}, torch {self.torch}, "
            f"Python {self.python}, in {self.seconds:.1f} s{clocks}"
        )


@dataclass
class Command:
    """A command of a transcript: the text after ``$``, its output and its exit status."""

    command_line: str
    output: list[str] = field(default_factory=list)
    status: int = 0
    line: int = 1  # the line number of the command in the transcript

    def lines(self) -> list[str]:
        """Return the lines of the command in its file: the command, its output, its status."""
        ending = [f"[exit status {self.status}]"] if self.status else []
        return [*f"$ {self.command_line}".split("\n"), *self.output, *ending]


@dataclass
class Transcript:
    """A parsed transcript."""

    commands: list[Command]
    provenance: Provenance | None = None
    name: str = field(default="transcript", compare=False)  # its path, for messages

    @classmethod
    def parse(cls, text: str, name: str = "transcript", offset: int = 0) -> Transcript:
        """Parse the text of a transcript.

        ``name`` is the file that contains the text, and ``offset`` is the number of lines of
        this file before the text. Raises BookError, with file and line, if the text is not a
        valid transcript.
        """

        def error(message: str, number: int) -> BookError:
            return BookError(f"{name}:{offset + number}: {message}")

        lines = text.rstrip("\n").split("\n") if text.strip() else []
        if not lines:
            raise error("the transcript is empty: write a `$ command` line into it", 1)
        provenance, commands = None, []
        if lines[0].startswith("# "):
            match = _PROVENANCE.match(lines[0])
            clocks = Clocks.parse(match["clocks"]) if match and match["clocks"] else None
            if match is None or (match["clocks"] and clocks is None):
                raise error(
                    "this is not a valid `# recorded …` line: delete it and record again", 1
                )
            parts = {"seconds": float(match["seconds"]), "clocks": clocks}
            provenance = Provenance(**match.groupdict() | parts)
        is_continued = False  # whether the command continues on the next line
        for number, line in enumerate(lines, 1):
            if provenance and number == 1:
                continue
            if is_continued:
                commands[-1].command_line += f"\n{line}"
            elif line.startswith("$ "):
                commands.append(Command(line[2:], line=number))
            elif not commands:
                what = "this output is before the first `$ command` line"
                raise error(f"{what}: write its command above it", number)
            elif match := _STATUS.match(line):
                commands[-1].status = int(match[1])
            elif commands[-1].status:
                what = "this output is after `[exit status …]`"
                raise error(f"{what}: move it above the exit status", number)
            else:
                commands[-1].output.append(line)
            is_continued = line.endswith("\\") and (is_continued or line.startswith("$ "))
        if not commands:
            raise error("the transcript has no `$ command` line: add one", 1)
        return cls(commands, provenance, name)

    def text(self) -> str:
        """Return the text of the transcript, as `parse` expects it."""
        head = [str(self.provenance)] if self.provenance else []
        body = [line for command in self.commands for line in command.lines()]
        return "\n".join([*head, *body]) + "\n"


def output_lines(text: str) -> list[str]:
    """Return the output of a command as lines for a transcript, without trailing whitespace.

    A carriage return deletes the text before it, as in a terminal. Raises ValueError if
    `Transcript.parse` would not read a line as output.
    """
    lines = [re.sub(r".*\r(?=.)", "", line).rstrip() for line in text.rstrip().split("\n")]
    lines = [] if lines == [""] else lines
    for line in lines:
        if line.startswith("$ ") or _STATUS.match(line):
            raise ValueError(
                f"the output line {line!r} would be read as a command or an exit status of the "
                "transcript: let the program print something else"
            )
    return lines


@dataclass(frozen=True)
class Tolerances:
    """The allowed differences between the numbers of an output and those of a transcript.

    A number after ``≈`` is called measured if it is in a match of one of the patterns
    ``measured``. Such a number is a time, or depends on the machine in a different way.
    """

    measured: tuple[str, ...] = ()  # regular expressions, searched in each line
    compare_points: bool = True  # whether the curves of the figure must be equal
    same_gpu: bool = False  # whether output and transcript are from the same kind of GPU

    def is_measured(self, line: str, position: int) -> bool:
        """Return whether the number at ``position`` of a line depends on the machine."""
        matches = (match for each in self.measured for match in re.finditer(each, line))
        return any(match.start() <= position < match.end() for match in matches)

    def allow(self, expected: re.Match, actual: re.Match) -> bool:
        """Return whether two numbers after ``≈`` agree, given as matches of `APPROXIMATE`."""
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


DEFAULT_TOLERANCES = Tolerances()  # for a program that declares no measured numbers


def _shape(line: str) -> str:
    """Return the line with placeholders instead of the numbers that may differ."""
    if "≈" in line:
        line = re.sub(r" +", " ", APPROXIMATE.sub(r"≈#\1", line))
        line = line.replace(" ≈#", "≈#").strip()
    return _DECIMAL.sub("#.#", line)


def same_line(expected: str, actual: str, tolerances: Tolerances = DEFAULT_TOLERANCES) -> bool:
    """Return whether two output lines agree.

    Text and integers must be equal. A decimal may differ by one unit of its last printed digit,
    because kernels for different instruction sets add in different orders. A number directly
    after ``≈`` may be larger or smaller by a factor, which depends on ``tolerances`` and on the
    kind of the number (see `TIMING_FACTOR` and the constants after it). One or two units of the
    last digit are also allowed, so that 0.0% and 0.1% agree, but 0.0% and 75% do not.
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
        return 1e-6  # 0e+00 is an error that is too small for float32
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def _value(text: str) -> float:
    return float(re.sub("[≈ ,_%×]", "", text))


def _decimals(line: str) -> list[str]:
    """Return the numbers of a line that are not integers and do not follow ``≈``."""
    return _DECIMAL.findall(APPROXIMATE.sub("", line))


def difference(
    expected: list[str], actual: list[str], tolerances: Tolerances = DEFAULT_TOLERANCES
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
