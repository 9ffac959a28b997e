"""Reproduces two errors of the loader: "cannot open shared object file", "undefined symbol".

A compiled extension contains the names of the libraries that it needs, with their version, and
the names of the functions that it calls. The loader searches for both when Python imports the
extension. The library of this program has one function, and the file name of CUDA 11's runtime.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = "libcudart.so.11.0"
OLD = 'extern "C" int cudaRuntimeGetVersion(int* version) { *version = 11000; return 0; }'
NEW = 'extern "C" int cudaGetDeviceCount(int* count) { *count = 1; return 0; }'
EXTENSION = """
extern "C" int cudaRuntimeGetVersion(int*);
extern "C" int answer() { int version; cudaRuntimeGetVersion(&version); return version; }
"""


def build(source: str, output: Path, *flags: str) -> None:
    command = ["g++", "-shared", "-fPIC", "-o", str(output), "-x", "c++", "-", "-x", "none"]
    subprocess.run([*command, *flags], input=source, text=True, check=True)


def load(path: str = "") -> str:
    """Load the extension in a new process, and return the last line that it prints."""
    code = "import ctypes; print(ctypes.CDLL('./extension.so').answer())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"LD_LIBRARY_PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return (done.stdout + done.stderr).strip().splitlines()[-1].removeprefix("OSError: ")


def main() -> None:
    if shutil.which("g++") is None or sys.platform != "linux":
        sys.exit("loader.py needs Linux and g++")
    folder = Path("cuda11")
    folder.mkdir()
    build(OLD, folder / LIBRARY, f"-Wl,-soname,{LIBRARY}")
    build(EXTENSION, Path("extension.so"), str(folder / LIBRARY))

    output = load()
    print(f"the library is in a folder that the loader does not search\n  {output}")
    assert output == f"{LIBRARY}: cannot open shared object file: No such file or directory"

    # a fix: add the folder. A better fix is an extension that was built for torch's CUDA
    output = load(path="cuda11")
    print(f"LD_LIBRARY_PATH=cuda11\n  {output}")
    assert output == "11000"

    # a library with the same name, but without the function, as in a different release
    build(NEW, folder / LIBRARY)
    output = load(path="cuda11")
    print(f"the library is of a different release\n  {output}")
    assert output == "./extension.so: undefined symbol: cudaRuntimeGetVersion"

    # the loader does not search for a library that the process has loaded already
    build(OLD, folder / LIBRARY, f"-Wl,-soname,{LIBRARY}")
    ctypes.CDLL(str(folder / LIBRARY))
    print(f"the library was loaded before\n  {ctypes.CDLL('./extension.so').answer()}")


if __name__ == "__main__":
    main()
