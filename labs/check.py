"""Grade your copy of a lab: python labs/check.py my_labs/lab02_ddp.py

Every step runs in fresh processes at several world sizes and is compared with what one process
computes. What you get is what is right, what is wrong, and a hint that fits the mistake.
The exit status is 0 only if every step passes.
"""

import argparse
import os
import re
import signal
import sys
import textwrap
from pathlib import Path

# before torch is imported: ranks share the processor, and the grade is that of the CPU
GPUS = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
sys.dont_write_bytecode = True

import graders as graders_of  # noqa: E402
from graders import runner  # noqa: E402

INDENT = " " * 8


def show(label: str, text: str) -> None:
    """Print a paragraph behind a label, wrapped."""
    print(
        textwrap.fill(
            text, 92, initial_indent=f"{INDENT}{label:7}", subsequent_indent=INDENT + " " * 7,
            break_long_words=False, break_on_hyphens=False,
        )
    )  # fmt: skip


def ranks(worlds: list[int]) -> str:
    """Name world sizes: "1, 2 and 3 ranks"."""
    *most, last = map(str, sorted(worlds))
    return (
        f"{', '.join(most)} and {last} ranks" if most else f"{last} rank" + "s" * (last != "1")
    )


def grade(
    machine: runner.Runner, step: runner.Step, path: Path, output: bool, alone: bool
) -> bool:
    """Run one step at all its world sizes, stop at the first failure, print; True if passed.

    `alone`: the lab is a program of one process, so nothing need be said about ranks. A trial
    runs what it needs by itself.
    """
    if isinstance(step, runner.Trial):
        return grade_trial(machine, step, path, output)
    passed = []
    for world in step.worlds:
        found: list[str] = []
        group = machine.run(step, path, world)
        try:
            runner.judge_ends(group, step)
            if step.symmetric:
                runner.compare_calls(group, step)
            step.judge(group, found.append)
        except runner.Blank as blank:
            print(f"step {step.number}  blank   {step.title}")
            show("to do:", str(blank))
            return False
        except runner.Wrong as wrong:
            print(f"step {step.number}  wrong   {step.title}")
            if passed:
                show("right:", f"all is well at {ranks(passed)}")
            for text in found:
                show("right:", text)
            at = "" if alone else f"at {ranks([world])}, "
            show("wrong:", f"{at}{wrong.what}")
            show("hint:", wrong.hint)
            if output:
                for number, rank in enumerate(group.ranks):
                    for line in rank.output.splitlines()[-20:]:
                        print(f"{INDENT}rank {number} printed: {line}")
            return False
        passed.append(world)
    at = "" if alone else f" ({ranks(passed)})"
    print(f"step {step.number}  passed  {step.title}{at}")
    show("right:", step.proves)
    return True


def grade_trial(machine: runner.Runner, step: runner.Trial, path: Path, output: bool) -> bool:
    """Run a trial, print what it found; True if it passed."""
    found: list[str] = []
    with machine.bench(step, path) as bench:
        try:
            step.judge(bench, found.append)
        except runner.Blank as blank:
            print(f"step {step.number}  blank   {step.title}")
            show("to do:", str(blank))
            return False
        except runner.Wrong as wrong:
            print(f"step {step.number}  wrong   {step.title}")
            for text in found:
                show("right:", text)
            show("wrong:", wrong.what)
            show("hint:", wrong.hint)
            for line in bench.last_words() if output else []:
                print(f"{INDENT}it printed: {line}")
            return False
    print(f"step {step.number}  passed  {step.title}")
    for text in [*found, step.proves]:
        show("right:", text)
    return True


def grade_file(path: Path, chosen: int | None, limit: float, output: bool, gpus: bool) -> bool:
    """Grade all steps of a file, or one and those it needs; True if all asked for passed."""
    lab = re.match(r"\w+(?=\.|-|$)", path.name)
    graders = sorted(Path(__file__).parent.glob("graders/lab*.py"))
    graders += sorted((graders_of.ASSESSMENT / "graders").glob("[a-z]*.py"))
    known = [grader.stem for grader in graders]
    if lab is None or lab[0] not in known:
        sys.exit(f"{path.name}: the name must begin with that of a lab: {', '.join(known)}")
    if not path.is_file():
        sys.exit(f"there is no file {path}: python labs/start.py writes one")
    steps = runner.importlib.import_module(f"graders.{lab[0]}").STEPS
    if chosen is not None and chosen not in [step.number for step in steps]:
        sys.exit(f"{lab[0]} has steps 1 to {steps[-1].number}, there is no step {chosen}")
    asked = [step for step in steps if chosen in (None, step.number)]
    wanted = {step.number for step in asked} | {n for step in asked for n in step.needs}

    sizes = sorted({world for step in steps for world in step.worlds})
    at = "" if sizes == [1] else f" at {ranks(sizes)}"
    print(f"{path}, graded on {'this machine' if gpus else 'the CPU'}{at}")
    passed: set[int] = set()
    with runner.Runner(lab[0], limit, GPUS if gpus else {}) as machine:
        for step in (step for step in steps if step.number in wanted):
            if missing := [number for number in step.needs if number not in passed]:
                print(f"step {step.number}  later   {step.title}")
                show(
                    "to do:", f"this step builds on step {missing[0]}: make that one pass first"
                )
            elif grade(machine, step, path.resolve(), output, sizes == [1]):
                passed.add(step.number)
            sys.stdout.flush()
    print(f"{len(passed)} of {len(wanted)} steps pass", flush=True)
    return passed == wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "files", nargs="+", type=Path, help="your copies of labs, or of parts of the assessment"
    )
    parser.add_argument("--step", type=int, help="grade this step (and those it builds on)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a step (60)")
    parser.add_argument(
        "--gpu", action="store_true", help="programs may use the GPUs (assessment)"
    )
    parser.add_argument("--output", action="store_true", help="show what failing ranks printed")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        results = [
            grade_file(path, options.step, options.limit, options.output, options.gpu)
            for path in options.files
        ]
    except KeyboardInterrupt:
        sys.exit("stopped")
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
