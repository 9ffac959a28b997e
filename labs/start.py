"""Write your own copy of a lab, in which the solutions are blank: python labs/start.py 02

`python labs/start.py capstone` writes your copy of a part of the assessment, together with the
files that this part reads. `python labs/start.py exercise` writes a program without blanks,
which you make faster. The copy is written to the folder my_labs/ in the current folder. An
existing file is never overwritten.
"""

import contextlib
import difflib
import re
import sys
from pathlib import Path

# a solution is Python code, or C++ code in a string of the lab
OPENING = re.compile(r"^( *)(#|//) >>> solution (\d+): (.+)$")
CLOSING = re.compile(r"^ *(#|//) <<< solution$")


def blank(text: str) -> str:
    """Return the program with each solution replaced by a line that says what belongs there."""
    lines, inside = [], None
    for line in text.splitlines():
        if opening := OPENING.match(line):
            inside = opening
            lines.append(line)
        elif CLOSING.match(line):
            indent, mark, number, task = inside.groups()
            if mark == "//":
                lines.append(f'{indent}#error "step {number}: {task}"')
            else:
                lines += [
                    f"{indent}raise NotImplementedError(",
                    f'{indent}    "step {number}: {task}"',
                    f"{indent})",
                ]
            lines.append(line)
            inside = None
        elif inside is None or line.lstrip().startswith(("# hint: ", "// hint: ")):
            lines.append(line)
    return "\n".join(lines) + "\n"


LABS = Path(__file__).parent
ASSESSMENT = LABS.parent / "assessment"
READ_BY_PROGRAMS = (".toml", ".yml", ".json")


def all_parts() -> dict[str, Path]:
    """The programs that a learner can start: labs by number, other programs by name."""
    labs = {path.stem[3:5]: path for path in sorted(LABS.glob("lab??_*.py"))}
    tasks = sorted(ASSESSMENT.glob("[a-z]*.py"))
    marked = [
        path
        for path in tasks
        if slow(path).exists() or ">>> solution" in path.read_text(encoding="utf-8")
    ]
    return labs | {path.stem: path for path in marked}


def slow(path: Path) -> Path:
    """The slow version of a program, which the learner gets instead of a copy with blanks."""
    return path.with_name(f"{path.stem}_slow.py")


def title_of(path: Path) -> str:
    """The heading of a lab, or the first line of the docstring of an assessment."""
    first, second = path.read_text(encoding="utf-8").splitlines()[:2]
    return second.removeprefix("# # ") if path.stem.startswith("lab") else first.strip('"')


def companions(path: Path) -> list[Path]:
    """The files that a program of the assessment reads, and the files of its folder."""
    if path.parent != ASSESSMENT:
        return []
    files = [p for p in ASSESSMENT.glob(f"{path.stem}*") if p.suffix in READ_BY_PROGRAMS]
    folder = ASSESSMENT / path.stem
    return sorted([*files, *(p for p in folder.rglob("*") if p.is_file())])


def parts_meant(asked: str, parts: dict[str, Path]) -> list[str]:
    """The names of all parts that `asked` can mean: exactly one if it is clear.

    It may be a number (2, lab02), the name of a file (labs/lab02_ddp.py), or the beginning of a
    name (assignment 4).
    """
    name = Path(asked).name.lower().removesuffix(".py")
    if number := re.fullmatch(r"(?:lab[ _-]?)?(\d\d?)(?:_.*)?", name):
        return [part for part in parts if part == number[1].zfill(2)]
    if name in parts:
        return [name]
    short = re.sub(r"[ _-]", "", name)
    begun = [part for part in parts if part.replace("_", "").startswith(short)]
    return begun if short[:1].isalpha() else []


def main() -> None:
    parts = all_parts()
    if len(sys.argv) == 1 or {"-h", "--help"} & set(sys.argv[1:]):
        width = max(map(len, parts))
        for name, path in parts.items():
            print(f"{name:{width}}  {title_of(path)}")
        print("To start one of them, run: python labs/start.py NUMBER or NAME")
        return
    asked = " ".join(sys.argv[1:])
    meant = parts_meant(asked, parts)
    if len(meant) != 1:
        advice = "To list all labs, run python labs/start.py without a name."
        if near := meant or difflib.get_close_matches(asked, parts, n=3):
            advice = f"Did you mean {' or '.join(near)}?"
        wrong = "fits more than one" if len(meant) > 1 else "is not the name of a"
        sys.exit(f'"{asked}" {wrong} lab or part of the assessment. {advice}')
    wanted = meant[0]
    original = parts[wanted]
    begin = "labs" if original.parent == LABS else "assessment"
    begins = slow(original) if slow(original).exists() else original
    copies = {Path("my_labs", original.name): begins}
    for path in companions(original):
        if "__pycache__" not in path.parts:
            copies[Path("my_labs", path.relative_to(ASSESSMENT))] = path
    exists = "already exists, and start.py does not overwrite your work. Move it away first."
    for copy in copies:  # write no file if one of the files exists
        if copy.exists():
            sys.exit(f"{copy} {exists}")
    for copy, path in copies.items():
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("x", encoding="utf-8") as file:
                file.write(blank(path.read_text(encoding="utf-8")))
        except FileExistsError:
            sys.exit(f"{copy} {exists}")
        except OSError as error:
            with contextlib.suppress(OSError):
                copy.unlink()  # on a full disk, only a part of it was written
            sys.exit(
                f"start.py cannot write {copy}: {error.strerror}. Make sure that the disk has "
                "free space and that you may write to this folder, and run the command again."
            )
        print(f"wrote {copy}")
    # the command at the top of the lab says how many ranks it needs
    text, copy = original.read_text(encoding="utf-8"), Path("my_labs", original.name)
    command = re.search(
        rf"^(?:#| ) +((?:torchrun|python) .*{begin}/{original.name}.*)$", text, re.M
    )
    begun = command[1].replace(f"{begin}/", "my_labs/")
    print(f"run it:   {begun}")
    print(f"grade it: python {Path(sys.argv[0])} {copy}".replace("start.py", "check.py"))


if __name__ == "__main__":
    main()
