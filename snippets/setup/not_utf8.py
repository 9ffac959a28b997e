"""A program prints ≈ where the locale has an encoding without it.

A locale of that kind may not be installed here, so PYTHONIOENCODING plays it: it gives a Python
the encoding of its output.
"""

import os
import subprocess
import sys


def main() -> None:
    for encoding in ("latin-1", "utf-8"):
        done = subprocess.run(
            [sys.executable, "-c", r"print('\u2248 2 s')"],
            env=os.environ | {"PYTHONIOENCODING": encoding},
            capture_output=True,
        )
        said = done.stderr.decode() or f"{len(done.stdout)} bytes: {done.stdout.decode()}"
        print(f"{encoding}: {said.splitlines()[-1]}")


if __name__ == "__main__":
    main()
