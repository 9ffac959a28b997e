"""Triton's assembler may be older than your GPU: this program shows how you replace it.

Triton's wheel contains two assemblers. The assembler ptxas-blackwell is newer than ptxas. The
program chooses a GPU that only the newer assembler supports, and it compiles a kernel for this
GPU. It needs no GPU itself. Then it sets each of two environment variables to the path of the
older assembler, and shows which of them has an effect.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # the compiler, not the interpreter
os.environ["TRITON_CACHE_DIR"] = str(Path("cache").absolute())
os.environ["TRITON_ALWAYS_COMPILE"] = "1"

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

VARIABLES = "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@triton.jit
def double_kernel(x_ptr):
    tl.store(x_ptr, 2 * tl.load(x_ptr))


# --8<-- [start:known]
def known_gpus(assembler: Path) -> set[str]:
    """The GPUs that this ptxas supports, according to its help text."""
    text = subprocess.run([assembler, "--help"], capture_output=True, text=True, check=True)
    return set(re.findall(r"'(sm_\d+a?)'", text.stdout))


def compile_for(gpu: str, **variables: Path) -> str:
    """Compile a kernel for a GPU. Return the error of the assembler, or "compiled"."""
    os.environ.update({name: str(path) for name, path in variables.items()})
    source = ASTSource(double_kernel, {"x_ptr": "*fp32"}, constexprs={})
    target = GPUTarget("cuda", int(re.sub(r"\D", "", gpu)), 32)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Triton prints the whole PTX
            binary = triton.compile(source, target=target)
    except triton.runtime.errors.PTXASError as error:
        return re.search(r"ptxas\S* fatal .*", str(error)).group()
    finally:
        for name in variables:
            del os.environ[name]
    assert len(binary.asm["cubin"]) > 0 and f".target {gpu}" in binary.asm["ptx"]
    return "compiled"


# --8<-- [end:known]


def recorder(assembler: Path, calls: Path) -> Path:
    """A script that runs this assembler, and appends the options of each call to a file."""
    script = Path("recording_ptxas").absolute()
    script.write_text(f'#!/bin/sh\necho "$@" >>"{calls}"\nexec "{assembler}" "$@"\n')
    script.chmod(0o755)
    return script


def main() -> None:
    for variable in VARIABLES:
        os.environ.pop(variable, None)
    old, new = BIN / "ptxas", BIN / "ptxas-blackwell"
    only_new = [
        gpu for gpu in ("sm_121a", "sm_110a") if gpu in known_gpus(new) - known_gpus(old)
    ]
    if not only_new:
        sys.exit("Both assemblers of this Triton support the same GPUs.")
    gpu = only_new[0]  # sm_121a up to Triton 3.7, sm_110a since 3.8
    print("sm_… is a GPU that only ptxas-blackwell supports")

    calls = Path("calls.txt").absolute()
    calls.write_text("")
    ours = recorder(old, calls)
    results = {
        "as installed": compile_for(gpu),
        "TRITON_PTXAS_PATH=ptxas": compile_for(gpu, TRITON_PTXAS_PATH=ours),
    }
    assert "gpu-name" not in calls.read_text()  # this variable does not matter here
    assert compile_for("sm_80", TRITON_PTXAS_PATH=ours) == "compiled"
    assert "gpu-name=sm_80" in calls.read_text()  # for an A100 this variable matters
    blackwell = compile_for(gpu, TRITON_PTXAS_BLACKWELL_PATH=ours)
    results["TRITON_PTXAS_BLACKWELL_PATH=ptxas"] = blackwell
    for name, result in results.items():
        print(f"{name}\n  {result.replace(gpu, 'sm_…')}")
    fatal = f"ptxas fatal   : Value '{gpu}' is not defined for option 'gpu-name'"
    assert [*results.values()] == ["compiled", "compiled", fatal]
    # the control: the older assembler works for a GPU that both assemblers support
    assert "sm_120a" in known_gpus(old) & known_gpus(new)
    control = compile_for("sm_120a", TRITON_PTXAS_BLACKWELL_PATH=ours)
    assert "gpu-name=sm_120a" in calls.read_text()
    print(f"sm_120a, TRITON_PTXAS_BLACKWELL_PATH=ptxas\n  {control}")
    assert control == "compiled"


if __name__ == "__main__":
    main()
