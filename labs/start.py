"""Write your own copy of a lab, with the solutions taken out: python labs/start.py 02

The copy goes to my_labs/ in the current folder. A file that is there already is left alone.
"""

import re
import sys
from pathlib import Path

# in Python, or in C++ that a string of the lab holds
OPENING = re.compile(r"^( *)(#|//) >>> solution (\d+): (.+)$")
CLOSING = re.compile(r"^ *(#|//) <<< solution$")


def blank(text: str) -> str:
    """Replace what lies between the solution marks by a line that says what belongs there."""
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


def main() -> None:
    labs = {path.stem[3:5]: path for path in sorted(Path(__file__).parent.glob("lab??_*.py"))}
    if len(sys.argv) == 1:
        for number, path in labs.items():
            title = path.read_text(encoding="utf-8").splitlines()[1].removeprefix("# # ")
            print(f"{number}  {title}")
        print("begin one with: python labs/start.py NUMBER")
        return
    wanted = sys.argv[1].zfill(2)
    if len(sys.argv) > 2 or wanted not in labs:
        sys.exit(f"there is no lab {' '.join(sys.argv[1:])}: choose one of {', '.join(labs)}")
    copy = Path("my_labs", labs[wanted].name)
    try:
        copy.parent.mkdir(exist_ok=True)
        with copy.open("x", encoding="utf-8") as file:
            file.write(blank(labs[wanted].read_text(encoding="utf-8")))
    except FileExistsError:
        sys.exit(
            f"{copy} exists already, and I will not overwrite your work: move it away first"
        )
    except OSError as error:
        sys.exit(f"cannot write {copy}: {error.strerror}")
    print(f"wrote {copy}")
    # by the command that stands at the top of the lab: as many ranks as it says
    text = labs[wanted].read_text(encoding="utf-8")
    command = re.search(r"^#     ((?:torchrun|python) .*)labs/lab", text, re.M)[1]
    print(f"run it:   {command}{copy}")
    print(f"grade it: python {Path(sys.argv[0])} {copy}".replace("start.py", "check.py"))


if __name__ == "__main__":
    main()
