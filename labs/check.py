"""Grade your copy of a lab: python labs/check.py my_labs/lab02_ddp.py

Every step runs in new processes at several world sizes. The result is compared with the result
of one process. For each step, the grader prints what is right and what is wrong, with a hint
that fits the mistake. The exit status is 0 only if every step passes. Some steps have scores,
for example a number of messages, of which fewer are better: --report writes them to a file.
--draw draws the schedule of your pipeline (lab 10, capstone) next to the schedule 1F1B.
"""

import argparse
import ast
import functools
import os
import re
import signal
import sys
import textwrap
import tomllib
from collections import Counter
from pathlib import Path

# set before torch is imported: the ranks share the processor, and grading uses the CPU
GPUS = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "src")]
for folder in ("graders", "src/worldsize/execution"):
    if not (ROOT / folder).is_dir():
        sys.exit(
            f"check.py needs the folder {ROOT / folder}, which does not exist. "
            "Use a complete copy of the repository."
        )
GRADERS = sorted(ROOT.glob("graders/labs/lab*.py")) + sorted(
    ROOT.glob("graders/assessment/*.py")
)


def parser() -> argparse.ArgumentParser:
    """Return the parser for the options of the command."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "files", nargs="+", type=Path, help="your copies of labs or of parts of the assessment"
    )
    options.add_argument(
        "--step", type=int, help="grade only this step and the steps that it needs"
    )
    options.add_argument(
        "--limit",
        type=float,
        default=60.0,
        help="limit for the processor time of each process in a step, in seconds (default: 60)",
    )
    options.add_argument(
        "--gpu", action="store_true", help="let the programs use the GPUs (assessment only)"
    )
    options.add_argument(
        "--more", action="store_true", help="also print how to fix a fault (exercise only)"
    )
    options.add_argument(
        "--output", action="store_true", help="show what the ranks of a wrong step printed"
    )
    options.add_argument(
        "--report", type=Path, metavar="FILE", help="write the scores to a new TOML file"
    )
    options.add_argument(
        "--draw",
        type=Path,
        metavar="FILE",
        help="draw your pipeline schedule in a new SVG file",
    )
    return options


def lab_name(path: Path) -> str:
    """Return the name of the lab, or of the part of the assessment, to which a file belongs.

    The name of the file begins with the name of the lab, or with its number: lab02_ddp.py,
    "lab02_ddp copy.py", lab02.py, assignment4_mine.py. End the program with a message if the
    file cannot be graded.
    """
    graders, lowercase = [grader.stem for grader in GRADERS], path.name.lower()
    names = [stem for stem in graders if lowercase.startswith(stem)]
    if not names and (number := re.match(r"[a-z]+\d+", lowercase)):
        names = [stem for stem in graders if stem.startswith(f"{number[0]}_")]
    if not names:
        sys.exit(
            f"The name of the file {path.name} must begin with the name of a lab, such as "
            "lab02_ddp, or of a part of the assessment, such as capstone. Rename the file."
        )
    name = max(names, key=len)
    if not path.is_file():
        sys.exit(f"There is no file {path}. To write one, run: python labs/start.py {name}")
    if path.suffix.lower() != ".py":
        sys.exit(f"{path.name} is not a Python file. Rename it so that its name ends in .py.")
    check_content(path, name)
    return name


def defined_in(code: list[ast.stmt]) -> set[str]:
    """Return the names of functions and classes, without those that most programs define."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = {each.name for each in code if isinstance(each, kinds)}
    return found - {"main", "init_distributed", "check", "stop_at_blank"}


@functools.cache
def defined_in_file(finished: Path) -> set[str]:
    """Return the names that a finished lab defines, or an empty set if it does not exist."""
    return defined_in(ast.parse(finished.read_bytes()).body) if finished.is_file() else set()


def check_content(path: Path, name: str) -> None:
    """End the program with a message if a file is empty, or is the file of a different lab."""
    program = path.read_bytes()
    if b"\0" in program:
        sys.exit(f"{path} is not a text file in UTF-8. Save it again in this encoding.")
    try:
        code = ast.parse(program).body
    except (SyntaxError, ValueError):
        return  # later, the grader reports the error and its line
    docstrings = [
        e for e in code if isinstance(e, ast.Expr) and isinstance(e.value, ast.Constant)
    ]
    if len(docstrings) == len(code):
        problem = "contains no code" if program.strip() else "is empty"
        sys.exit(
            f"{path} {problem}. To get a new copy in my_labs/, delete this file and run: "
            f"python labs/start.py {name}"
        )
    finished = {grader.stem: ROOT / grader.relative_to(ROOT / "graders") for grader in GRADERS}
    found = defined_in(code)
    expected = defined_in_file(finished[name]) or found
    if 2 * len(found & expected) > len(expected):
        return
    defined = {
        stem: defined_in_file(file) for stem, file in finished.items() if defined_in_file(file)
    }
    labs_with = Counter(each for names in defined.values() for each in names)
    # for each lab, the number of functions in the file that only this lab defines
    unique = {
        stem: sum(labs_with[each] == 1 for each in found & names)
        for stem, names in defined.items()
    }
    likely = max(unique, key=lambda stem: unique[stem])
    if (unique[likely] >= 3 or found == defined[likely]) and not unique.get(name):
        sys.exit(
            f"{path} contains functions of {likely}, and no function of {name}. Rename the "
            f"file so that its name begins with {likely}."
        )


if __name__ == "__main__":
    # check arguments and files now, so that a mistake ends the program before torch is imported
    for file in parser().parse_args().files:
        lab_name(file)

from worldsize.execution import host_checks  # noqa

NO_SPACE = (
    f"{host_checks.DISK_FULL}: check.py cannot write its temporary files. Free some space, or "
    "set the environment variable TMPDIR to a different folder."
)

try:  # if dill is installed, torch imports dill, which needs a folder for temporary files
    from graders import scores, verdict
    from graders.dsl import Lab
    from graders.protocol import Blank, Judge, Wrong
    from graders.step import IntegrationStep, Step, lab_of
    from graders.supervisor import RendezvousServer, Supervisor
except OSError as error:
    if not host_checks.is_disk_full(error):
        raise
    sys.exit(NO_SPACE)

INDENT = " " * 8


def show(label: str, text: str) -> None:
    """Print a label and a paragraph, with line breaks."""
    print(
        textwrap.fill(
            text, 92, initial_indent=f"{INDENT}{label:7}", subsequent_indent=INDENT + " " * 7,
            break_long_words=False, break_on_hyphens=False,
        )
    )  # fmt: skip


def ranks(world_sizes: list[int]) -> str:
    """Return world sizes in words: "1, 2 and 3 ranks"."""
    *most, last = map(str, sorted(world_sizes))
    return (
        f"{', '.join(most)} and {last} ranks" if most else f"{last} rank" + "s" * (last != "1")
    )


class Grading:
    """The grading of one file, and its results."""

    def __init__(
        self, path: Path, lab: Lab, supervisor: Supervisor, options: argparse.Namespace
    ):
        self.path, self.lab, self.supervisor = path.resolve(), lab, supervisor
        self.program = self.path.read_bytes()  # for the report: the code that was graded
        self.output, self.more = options.output, options.more
        self.sizes = sorted({world for step in lab.steps for world in step.world_sizes})
        self.scores: dict[int, dict[str, float]] = {}  # by step
        self.counted_at: dict[int, int] = {}  # by step: the number of ranks of its scores
        self.right = False  # all requested steps passed
        self.schedule: list[list[str]] = []  # of the largest group with a pipeline

    def grade(self, step: Step) -> bool:
        """Run a step at each of its world sizes until one fails. Return whether all passed.

        A trial starts its own groups. If all steps of a lab use one process, the numbers of
        ranks are not printed.
        """
        if isinstance(step, IntegrationStep):
            with self.supervisor.workspace(step, self.path) as workspace:
                right: list[str] = []
                passed = self.judge(step, step.trial(workspace), right, "")
                if passed is False and self.output:
                    for line in workspace.last_lines():
                        print(f"{INDENT}it printed: {line}")
                self.scores[step.number] = workspace.scores
            return passed is True and self.print_passed(step, "", right)
        passed_at: list[int] = []  # world sizes
        scores_at: dict[int, dict[str, float]] = {}  # by world size
        for world in step.world_sizes:
            group = self.supervisor.run(step, self.path, world)
            schedule = scores.schedule_of(group)
            if len(schedule) > len(self.schedule):
                self.schedule = schedule
            right = [f"all checks pass at {ranks(passed_at)}"] if passed_at else []
            at = "" if self.sizes == [1] else f"at {ranks([world])}, "
            passed = self.judge(step, verdict.judge(group, step), right, at)
            if passed is False and self.output:
                for number, rank in enumerate(group.ranks):
                    for line in rank.output.splitlines()[-20:]:
                        print(f"{INDENT}rank {number} printed: {line}")
            if not passed:
                return False
            passed_at.append(world)
            scores_at[world] = scores.group_scores(group)
        self.scores[step.number] = scores_at[max(scores_at)]
        self.counted_at[step.number] = max(scores_at)
        at = "" if self.sizes == [1] else f" ({ranks(passed_at)})"
        return self.print_passed(step, at, [])

    def judge(self, step: Step, judge: Judge | None, right: list[str], at: str) -> bool | None:
        """Print the mistake or the blank of a step. Return True if the step is right.

        Return False for a mistake, and None for a blank. `right` gets the correct results.
        """
        try:
            for text in judge or ():
                right.append(text)
        except Blank as blank:
            print(f"step {step.number}  blank   {step.title}")
            show("to do:", str(blank))
            return None
        except Wrong as wrong:
            print(f"step {step.number}  wrong   {step.title}")
            for text in right:
                show("right:", text)
            show("wrong:", at + wrong.what)
            show("hint:", self.lab.hint(wrong.hint))
            if self.more and wrong.hint in self.lab.hints.fixes:
                show("fix:", self.lab.hints.fixes[wrong.hint])
            return False
        return True

    def print_passed(self, step: Step, at: str, right: list[str]) -> bool:
        """Print that a step passed, and its correct results. Return True."""
        print(f"step {step.number}  passed  {step.title}{at}")
        for text in [*right, step.proves]:
            show("right:", text)
        return True


def grade_file(
    path: Path, name: str, options: argparse.Namespace, rendezvous: RendezvousServer
) -> Grading:
    """Grade all steps of a file, or one step and the steps that it needs."""
    only_step = options.step
    lab = lab_of(name)
    if only_step is not None and only_step not in [step.number for step in lab.steps]:
        sys.exit(
            f"There is no step {only_step} in {name}. Choose a step from 1 to {len(lab.steps)}."
        )
    chosen_steps = [step for step in lab.steps if only_step in (None, step.number)]
    wanted = {step.number for step in chosen_steps} | {
        n for step in chosen_steps for n in step.needs
    }

    passed: set[int] = set()
    gpus = GPUS if options.gpu else {}
    with Supervisor(name, options.limit, gpus, rendezvous) as supervisor:
        grading = Grading(path, lab, supervisor, options)
        at = "" if grading.sizes == [1] else f" at {ranks(grading.sizes)}"
        print(f"{path}, graded on {'this machine' if options.gpu else 'the CPU'}{at}")
        for step in (step for step in lab.steps if step.number in wanted):
            if missing := [number for number in step.needs if number not in passed]:
                print(f"step {step.number}  later   {step.title}")
                show("to do:", f"this step needs step {missing[0]}, so finish that step first")
            elif grading.grade(step):
                passed.add(step.number)
            sys.stdout.flush()
    print(f"{len(passed)} of {len(wanted)} steps pass")
    grading.scores = {n: found for n, found in grading.scores.items() if found and n in passed}
    for number, found in grading.scores.items():
        values = ", ".join(f"{name} {value:,}" for name, value in found.items())
        world = grading.counted_at.get(number, 1)
        at = "" if world == 1 else f" ({ranks([world])})"
        print(f"score   step {number}  {values}{at}")
    sys.stdout.flush()
    grading.right = passed == wanted
    return grading


def report(graded: list[Grading]) -> str:
    """Return the scores as TOML, with the code of each program that is not a finished lab."""
    labs, text = {}, ""
    for each in graded:
        name = each.lab.path.relative_to(ROOT / "graders").as_posix()
        try:
            program = ("file", name)
            if each.path != ROOT / name:
                program = ("program", each.program.decode())
            labs[each.lab.path.stem] = (*program, each.scores)
            text = scores.report(labs)
            tomllib.loads(text)
        except ValueError as error:
            sys.exit(
                f"{each.path} contains a character that a TOML report cannot contain: {error}. "
                "Remove this character."
            )
    return text


def write(path: Path, text: str) -> None:
    """Write a new file, and print its name."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    print(f"wrote {path}", flush=True)


def main() -> None:
    options = parser().parse_args()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # some terminals cannot print all characters
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = [lab_name(path) for path in options.files]
    for path in filter(None, (options.report, options.draw)):
        if path.exists():
            sys.exit(
                f"{path} already exists, and check.py does not overwrite it. Name a new file."
            )
        if not path.parent.is_dir():
            sys.exit(
                f"There is no folder {path.parent}. Create it, or name a different folder."
            )
        if not os.access(path.parent, os.W_OK):
            sys.exit(f"You may not write to the folder {path.parent}. Name a different folder.")
    if options.draw and len(names) > 1:
        sys.exit(f"--draw draws one program, but you named {len(names)}. Name one program.")
    if options.draw and options.draw == options.report:
        sys.exit(f"--draw and --report cannot both write to {options.draw}. Name two files.")
    if options.report and options.step:
        sys.exit("--report needs the scores of all steps. Leave out --step.")
    if options.report and len(set(names)) < len(names):
        sys.exit("--report accepts only one program of each lab. Grade the others separately.")
    try:
        with RendezvousServer() as rendezvous:
            results = [
                grade_file(path, name, options, rendezvous)
                for path, name in zip(options.files, names, strict=True)
            ]
    except KeyboardInterrupt:
        sys.exit("Grading was interrupted.")
    except OSError as error:
        if not host_checks.is_disk_full(error):
            raise
        sys.exit(NO_SPACE)
    right = all(graded.right for graded in results)
    scored = [graded for graded in results if graded.scores]
    reasons = []  # why a file was not written
    if options.draw and results[0].schedule:
        write(options.draw, scores.draw(results[0].schedule))
    elif options.draw:
        reasons.append(
            "No schedule was drawn: no step has run a pipeline. Only step 7 of lab 10 and "
            "step 6 of the capstone run one."
        )
    if options.report and right and scored:
        write(options.report, report(scored))
    elif options.report:
        reasons.append(
            "No report was written: "
            + (
                "these programs have no scores."
                if right
                else "a report needs all steps to pass."
            )
        )
    sys.exit("\n".join(reasons) or not right)


if __name__ == "__main__":
    main()
