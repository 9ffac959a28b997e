"""nvcc refuses a newer GCC than its header knows, and -ccbin names an older one.

No machine has every GCC. The program therefore starts the installed g++ with another number:
the header of CUDA compares only the macro __GNUC__, which a short script can set. The program
finds the newest number that nvcc accepts, and compares it with the message and with torch's
table.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from torch.utils.cpp_extension import CUDA_GCC_VERSIONS

MESSAGE = r"unsupported GNU version! gcc versions later than (\d+) are not supported!"


# --8<-- [start:probe]
def write_compiler(folder: str, gcc: int) -> Path:
    """Write a script `gcc` that runs the installed g++ and claims to be version `gcc`."""
    path = Path(folder).absolute() / "gcc"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -U__GNUC__ -D__GNUC__={gcc} "$@"\n')
    path.chmod(0o755)
    return path


def nvcc(*options: str, **variables: str) -> str:
    """Preprocess an empty CUDA file; return "accepted" or the number in nvcc's message."""
    Path("empty.cu").write_text("")
    done = subprocess.run(
        [shutil.which("nvcc"), "-E", *options, "empty.cu", "-o", "empty.ii"],
        capture_output=True, text=True, check=False, env=os.environ | variables,
    )  # fmt: skip
    if done.returncode == 0:
        return "accepted"
    return re.search(MESSAGE, done.stderr).group(1)


# --8<-- [end:probe]


def main() -> None:
    if not shutil.which("nvcc") or not shutil.which("g++"):
        sys.exit("This program needs nvcc and g++ on the PATH.")
    text = subprocess.run([shutil.which("nvcc"), "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+\.\d+)", text.stdout).group(1)
    for variable in ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        os.environ.pop(variable, None)

    tried = {gcc: nvcc("-ccbin", str(write_compiler("probe", gcc))) for gcc in range(11, 19)}
    accepted = [gcc for gcc, result in tried.items() if result == "accepted"]
    newest = max(accepted)
    assert accepted == list(range(11, newest + 1)) and newest < 18
    print(f"CUDA {release} accepts GCC up to {newest}")
    if release in CUDA_GCC_VERSIONS:
        assert (
            newest == CUDA_GCC_VERSIONS[release][1][0] - 1
        )  # torch's upper bound is exclusive

    # a distribution whose gcc is one version too new: nvcc takes the first gcc of the PATH
    new = write_compiler("new", newest + 1)
    old = write_compiler("old", newest)
    path = os.pathsep.join([str(new.parent), os.environ["PATH"]])
    limit = nvcc(PATH=path)
    print(f"GCC {newest + 1} is the first gcc on the PATH")
    print(f"  unsupported GNU version! gcc versions later than {limit} are not supported!")
    assert limit == str(newest)
    fixes = {
        "-ccbin": nvcc("-ccbin", str(old), PATH=path),
        "NVCC_CCBIN": nvcc(PATH=path, NVCC_CCBIN=str(old)),
        "-allow-unsupported-compiler": nvcc("-allow-unsupported-compiler", PATH=path),
    }
    for name, result in fixes.items():
        print(f"  {name}: {result}")
        assert result == "accepted"
    assert nvcc(PATH=path, CXX=str(old)) == nvcc(PATH=path, CC=str(old)) == str(newest)
    print("  CC or CXX alone: refused, because nvcc does not read them")


if __name__ == "__main__":
    main()
