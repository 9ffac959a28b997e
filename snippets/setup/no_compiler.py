"""Reproduces three errors: ninja, the CUDA toolkit or a C++ compiler is not installed.

The wheels of torch contain everything that runs kernels, but no tool that compiles them.
Extensions, DeepSpeed's operators and torch.compile search for ninja, nvcc and a C++ compiler.
"""

import os
from collections.abc import Callable

import torch
import torch._inductor.config as inductor
from torch.utils import cpp_extension

TWICE = "int twice(int x) { return 2 * x; }"


def print_error(what: str, call: Callable[[], object], expected: str) -> None:
    """Call a function that must fail, and print the first line of its error."""
    try:
        call()
    except Exception as error:
        text = str(error).splitlines()[0]
        print(f"{what}\n  {type(error).__name__}: {text}")
        assert expected in text
    else:
        raise AssertionError(f"{what}: the call did not fail")


def main() -> None:
    os.environ["PATH"] = ""  # as on a machine without these tools
    print_error(
        "no ninja on the PATH",
        lambda: cpp_extension.load_inline("twice", TWICE, functions="twice"),
        "Ninja is required",
    )
    cpp_extension.CUDA_HOME = None  # as on a machine without a CUDA toolkit
    print_error(
        "no CUDA toolkit",
        lambda: cpp_extension.CUDAExtension("kernels", ["kernels.cu"]),
        "CUDA_HOME environment variable is not set",
    )
    inductor.cpp.cxx = (None, "no-such-compiler")  # torch reads this name from CXX
    print_error(
        "no C++ compiler",
        lambda: torch.compile(torch.relu)(torch.ones(8)),
        "No working C++ compiler found",
    )


if __name__ == "__main__":
    main()
