"""libcudart.so.11.0: cannot open shared object file, and undefined symbol: the loader speaks.

A compiled extension names the libraries it needs, by file and version, and the functions it
takes from them. Both are looked up when Python imports it. The library here is a stub of one
function, and its name is that of CUDA 11's runtime.
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
    """What a new process says that loads the extension, with this LD_LIBRARY_PATH."""
    code = "import ctypes; print(ctypes.CDLL('./extension.so').answer())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"LD_LIBRARY_PATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return (done.stdout + done.stderr).strip().splitlines()[-1].removeprefix("OSError: ")


def main() -> None:
    if shutil.which("g++") is None or sys.platform != "linux":
        sys.exit("this program needs g++ and Linux")
    folder = Path("cuda11")
    folder.mkdir()
    build(OLD, folder / LIBRARY, f"-Wl,-soname,{LIBRARY}")
    build(EXTENSION, Path("extension.so"), str(folder / LIBRARY))

    said = load()
    print(f"the library lies where nobody looks\n  {said}")
    assert said == f"{LIBRARY}: cannot open shared object file: No such file or directory"

    # a fix: say where it is; the better one is an extension built for the CUDA that torch has
    said = load(path="cuda11")
    print(f"LD_LIBRARY_PATH=cuda11\n  {said}")
    assert said == "11000"

    # a library of that name without the function: another release
    build(NEW, folder / LIBRARY)
    said = load(path="cuda11")
    print(f"the library is there, in another release\n  {said}")
    assert said == "./extension.so: undefined symbol: cudaRuntimeGetVersion"

    # a process which has loaded a library of that name already is not asked where it lies
    build(OLD, folder / LIBRARY, f"-Wl,-soname,{LIBRARY}")
    ctypes.CDLL(str(folder / LIBRARY))
    print(f"loaded before the extension: {ctypes.CDLL('./extension.so').answer()}")


if __name__ == "__main__":
    main()
