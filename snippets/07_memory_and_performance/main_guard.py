"""Without `if __name__ == "__main__"`, spawn and forkserver run a program again in each worker.

The program writes small scripts that start a process, with the guard and without it. It runs
them with all three start methods. Then it does the same with the workers of a DataLoader. Since
Python 3.14 the default on Linux is forkserver, so scripts without the guard fail there.
"""

import subprocess
import sys
from pathlib import Path

# --8<-- [start:scripts]
PROCESS = """
import multiprocessing, sys
print("the top level runs", flush=True)

def work():
    print("the work is done", flush=True)

def main():
    process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    process.start()
    process.join()
    sys.exit(process.exitcode)

"""
LOADER = """
import sys
from torch.utils.data import DataLoader
print("the top level runs", flush=True)

def main():
    loader = DataLoader(range(4), num_workers=1, multiprocessing_context=sys.argv[1])
    print("the sum is", sum(batch.item() for batch in loader))

"""
WITHOUT = "main()\n"
WITH = 'if __name__ == "__main__":\n    main()\n'
# --8<-- [end:scripts]

PYTHON = (
    "An attempt has been made to start a new process before the current process has finished"
)
TORCH = "DataLoader worker (pid(s)"


def run(script: str, method: str) -> tuple[bool, list[str], str]:
    """Run a script; return whether it succeeded, the lines of its output, and its stderr."""
    Path("script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py", method], capture_output=True, text=True, check=False
    )
    return done.returncode == 0, done.stdout.splitlines(), " ".join(done.stderr.split())


def main() -> None:
    for method in ("fork", "spawn", "forkserver"):
        for end in (WITHOUT, WITH):
            succeeded, lines, errors = run(PROCESS + end, method)
            again = lines.count("the top level runs") > 1
            print(
                f"{method:10} {'with' if end == WITH else 'without':7} the guard: "
                f"{'the work is done' if succeeded else 'RuntimeError':16}"
                f"  the top level ran again: {again}"
            )
            assert succeeded == (method == "fork" or end == WITH)
            assert lines.count("the work is done") == succeeded
            assert again == (method != "fork")  # the guard protects only what is below it
            assert (PYTHON in errors) == (not succeeded)

    succeeded, lines, errors = run(LOADER + WITHOUT, "forkserver")
    assert not succeeded and {*lines} == {"the top level runs"} and PYTHON in errors
    print(f"a DataLoader without the guard\n  in the worker: RuntimeError: {PYTHON} …")
    if TORCH in errors:  # a newer Python may report the lost connection to the fork server
        print(
            "  in the program: RuntimeError: DataLoader worker (pid(s) …) exited unexpectedly"
        )
        assert errors.rindex(TORCH) > errors.rindex(PYTHON)  # the cause is printed first
    succeeded, lines, errors = run(LOADER + WITH, "forkserver")
    print(f"a DataLoader with the guard\n  {lines[-1]}")
    assert succeeded and lines[-1] == f"the sum is {0 + 1 + 2 + 3}" and PYTHON not in errors
    # the worker has imported the program too, so only the guard can have prevented the error
    assert len(lines) > 2 and {*lines[:-1]} == {"the top level runs"}


if __name__ == "__main__":
    main()
