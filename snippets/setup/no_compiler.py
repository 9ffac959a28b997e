"""Ninja is required, CUDA_HOME is not set, no working C++ compiler: extensions without tools.

torch's wheels bring what runs kernels, and nothing that compiles one. Extensions, DeepSpeed's
operators and torch.compile look for ninja, nvcc and a C++ compiler when they need them.
"""

import os
from collections.abc import Callable

import torch
import torch._inductor.config as inductor
from torch.utils import cpp_extension

TWICE = "int twice(int x) { return 2 * x; }"


def said_by(what: str, call: Callable[[], object], expected: str) -> None:
    """Print the error in which a call ends, its first line."""
    try:
        call()
    except Exception as error:
        text = str(error).splitlines()[0]
        print(f"{what}\n  {type(error).__name__}: {text}")
        assert expected in text
    else:
        raise AssertionError(f"{what}: it did not fail")


def main() -> None:
    os.environ["PATH"] = ""  # as where nothing was installed
    said_by(
        "no ninja on the PATH",
        lambda: cpp_extension.load_inline("twice", TWICE, functions="twice"),
        "Ninja is required",
    )
    cpp_extension.CUDA_HOME = None  # as where no toolkit was found
    said_by(
        "no CUDA toolkit",
        lambda: cpp_extension.CUDAExtension("kernels", ["kernels.cu"]),
        "CUDA_HOME environment variable is not set",
    )
    inductor.cpp.cxx = (None, "no-such-compiler")  # what it reads from CXX
    said_by(
        "no C++ compiler",
        lambda: torch.compile(torch.relu)(torch.ones(8)),
        "No working C++ compiler found",
    )


if __name__ == "__main__":
    main()
