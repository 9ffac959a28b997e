"""The mini-project: begin a package with an operator of your own, and check it by its rubric.

    python assessment/package_check.py --new my_operator
    python assessment/package_check.py my_operator

The first command writes a folder to begin with, the second says what is still missing: first
from the files alone, and when nothing is, with the operator at work. `pyproject.toml` names the
operator and a function that returns arguments to try it with.
"""

import argparse
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

SKELETON = {
    "pyproject.toml": """[build-system]
requires = ["setuptools", "torch"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME"
version = "0.1"

[tool.operator]
name = ""  # "namespace::operator"
samples = ""  # "module:function", which returns a list of tuples of arguments
""",
    "README.md": "# NAME\n\nWhat it computes, how it is built, how fast it is, where not.\n",
    "setup.py": "# CppExtension, or CUDAExtension where there is a CUDA compiler\n",
    "csrc/NAME.cpp": "// the schema, the CPU kernel, their registration\n",
    "NAME/__init__.py": '"""Load the library; register a fake, and gradients."""\n',
    "tests/test_NAME.py": '"""opcheck, gradcheck, numbers against torch."""\n',
    "benchmark.py": '"""The operator against plain torch, in turns, in one run."""\n',
}
RUBRIC = {
    "names": 'pyproject.toml: [tool.operator] needs name = "namespace::operator" and samples = '
    '"module:function".',
    "kernel": "csrc/: no kernel is registered. TORCH_LIBRARY (or STABLE_TORCH_LIBRARY) with "
    "the schema, and its _IMPL for a dispatch key.",
    "build": "setup.py: nothing is built. CppExtension or CUDAExtension, with BuildExtension.",
    "checked_arguments": "csrc/: no argument is checked. TORCH_CHECK its dtype, shape or "
    "device: a wrong pointer is a crash without a line.",
    "stream": "csrc/*.cu: the kernel is launched on the default stream. Ask for the current "
    "one (getCurrentCUDAStream), or it overtakes the kernels before it.",
    "guard": "csrc/*.cu: no device guard. On a second GPU the kernel runs on the first.",
    "launch_error": "csrc/*.cu: nobody asks whether the launch failed: "
    "C10_CUDA_KERNEL_LAUNCH_CHECK(), or cudaGetLastError.",
    "fake": "The package registers no fake: register_fake, or torch.compile stops at it.",
    "autograd": "The package registers no gradient: register_autograd.",
    "opcheck": "tests/: opcheck is not called.",
    "gradcheck": "tests/: gradcheck is not called, in fp64.",
    "benchmark": "benchmark.py: the old and the new way must be timed, and with a GPU after a "
    "synchronize (torch.utils.benchmark does it).",
    "readme": "README.md: no table with measured numbers, and the machine they are from.",
    "import": "The package cannot be imported from its folder. Build it in place first: python "
    "setup.py build_ext --inplace.",
    "samples": "The samples must have at least five tuples, one with an empty tensor and one "
    "with a tensor that is not contiguous.",
    "gradient": "No sample is in fp64, not empty and with requires_grad: nothing for "
    "gradcheck.",
    "not_cpp": "The kernel for the CPU is registered by Python, and not by your library.",
    "opcheck_fails": "torch.library.opcheck refuses a sample: read its message, it is precise.",
    "gradcheck_fails": "torch.autograd.gradcheck refuses the gradients in fp64.",
    "tests_fail": "The tests do not pass: python -m pytest in the folder.",
}  # fmt: skip


def text_of(folder: Path, *patterns: str) -> str:
    files = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def settings(folder: Path) -> dict[str, str]:
    try:
        return tomllib.loads(text_of(folder, "pyproject.toml"))["tool"]["operator"]
    except (KeyError, tomllib.TOMLDecodeError):
        return {}


def missing_in_files(folder: Path) -> Iterator[str]:
    """What the files alone tell, in the order in which one would write them."""
    named = settings(folder)
    if not re.fullmatch(r"\w+::\w+", named.get("name", "")) or ":" not in named.get(
        "samples", ""
    ):
        yield "names"
    cpp, cuda = text_of(folder, "csrc/*.cpp", "csrc/*.cu"), text_of(folder, "csrc/*.cu")
    package = text_of(folder, "*/__init__.py", "src/*/__init__.py", "*/ops.py")
    tests = text_of(folder, "tests/*.py")

    def lacks(text: str, pattern: str) -> bool:
        return not re.search(pattern, text)

    if lacks(cpp, r"TORCH_LIBRARY(_FRAGMENT)?\(") or lacks(cpp, r"TORCH_LIBRARY_IMPL\("):
        yield "kernel"
    if lacks(text_of(folder, "setup.py"), r"\b(Cpp|CUDA)Extension\("):
        yield "build"
    if lacks(cpp, r"TORCH_CHECK"):
        yield "checked_arguments"
    if "<<<" in cuda:
        if lacks(cuda, r"getCurrentCUDAStream|get_current_cuda_stream"):
            yield "stream"
        if lacks(cuda, r"(Device|CUDA|OptionalCUDA)Guard"):
            yield "guard"
        if lacks(cuda, r"KERNEL_LAUNCH_CHECK|cudaGetLastError|cudaPeekAtLastError"):
            yield "launch_error"
    for name, text, pattern in (
        ("fake", package, r"register_fake"),
        ("autograd", package, r"register_autograd"),
        ("opcheck", tests, r"opcheck\("),
        ("gradcheck", tests, r"gradcheck\("),
        ("benchmark", text_of(folder, "benchmark.py"), r"perf_counter|\.Timer\(|Event\("),
        ("readme", text_of(folder, "README.md"), r"(?m)^\|.*\d.*\|$"),
    ):  # fmt: skip
        if lacks(text, pattern):
            yield name


# --8<-- [start:at_work]
def missing_at_work(folder: Path) -> Iterator[str]:
    """What the operator does: samples, its kernel, opcheck, gradcheck; then its tests."""
    import torch

    sys.path[:0] = [str(folder), str(folder / "src")]
    named = settings(folder)
    module, _, function = named["samples"].partition(":")
    try:
        samples = getattr(importlib.import_module(module), function)()
        space, _, operator = named["name"].partition("::")
        op = getattr(getattr(torch.ops, space), operator).default
    except Exception as error:  # whatever their code does
        print(f"{type(error).__name__}: {error}")
        yield "import"
        return
    tensors = [t for sample in samples for t in sample if isinstance(t, torch.Tensor)]
    empty = any(t.numel() == 0 for t in tensors)
    if len(samples) < 5 or not empty or all(t.is_contiguous() for t in tensors):
        yield "samples"
    registered = torch._C._dispatch_dump(named["name"])
    kernels = re.findall(r"^(?:CPU|Composite\w+)\S*: registered at (\S+)", registered, re.M)
    if all(".py:" in place for place in kernels):
        yield "not_cpp"
    yield from refused(op, samples, torch)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests"], cwd=folder)
    if done.returncode:
        yield "tests_fail"


# --8<-- [end:at_work]
def refused(op: Callable, samples: list[tuple], torch) -> Iterator[str]:
    """opcheck on every sample, gradcheck on those of fp64 that require gradients."""
    for sample in samples:
        try:
            torch.library.opcheck(op, sample)
        except Exception as error:
            print(str(error)[:400])
            yield "opcheck_fails"
            return
    checked = 0
    for sample in samples:
        wanted = [t for t in sample if isinstance(t, torch.Tensor) and t.requires_grad]
        if not wanted or not all(t.dtype == torch.float64 and t.numel() for t in wanted):
            continue
        checked += 1
        if not torch.autograd.gradcheck(op, sample, raise_exception=False):
            yield "gradcheck_fails"
            return
    if not checked:
        yield "gradient"


def begin(folder: Path) -> None:
    if not folder.name.isidentifier():
        sys.exit(f"{folder.name} cannot be imported: a name of letters, digits and _")
    if folder.exists():
        sys.exit(f"{folder} exists already, and I will not overwrite your work")
    for name, text in SKELETON.items():
        path = folder / name.replace("NAME", folder.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NAME", folder.name), encoding="utf-8")
        print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--new", action="store_true", help="write a folder to begin with")
    options = parser.parse_args()
    if options.new:
        return begin(options.folder)
    if not options.folder.is_dir():
        sys.exit(f"there is no folder {options.folder}: --new writes one")
    missing = list(missing_in_files(options.folder))
    if not missing:
        print("the files are complete; the operator at work:", flush=True)
        missing = list(missing_at_work(options.folder.resolve()))
    for name in missing:
        print(f"missing: {RUBRIC[name]}")
    print("all of the rubric holds" if not missing else f"{len(missing)} points are missing")
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
