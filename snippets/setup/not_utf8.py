"""Reproduces a UnicodeEncodeError: a program prints ≈ in an encoding without this character.

The encoding usually follows from the locale. Such a locale may not be installed here, so the
program sets the encoding of the output with PYTHONIOENCODING.
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
        output = done.stderr.decode() or f"{len(done.stdout)} bytes: {done.stdout.decode()}"
        print(f"{encoding}: {output.splitlines()[-1]}")
        assert (done.returncode == 0) == (encoding == "utf-8")


if __name__ == "__main__":
    main()
