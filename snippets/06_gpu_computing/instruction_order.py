"""Where nvcc puts the loads and the stores of a loop among its multiplications.

    python instruction_order.py sgemm.cu double_buffer.cu tensor_cores.cu

A loop that loads ahead requests the next tiles before it multiplies, and stores them to shared
memory afterwards. The compiler may move the loads and the stores. This program compiles four
kernels for an H100 (sm_90). This needs nvcc, but no GPU.

The first table is for `double_buffered` and `tiled`, and for one variant of each, in which
`__syncwarp()` is removed or added. In the machine code, the program finds the loop with the
most multiplications. It prints how many of them come before the last load from global memory
and before the first store to shared memory. The second table is for `ahead` and `tile_2d`, and
for a variant of `tile_2d` in which a loop has a bound that is known only when the kernel runs.
It prints registers, local memory and the number of blocks that fit on an SM. The program
imports kernel_report.py and machine_code.py.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel_report import blocks_per_sm
from machine_code import Code, count, machine_code

INCLUDE = "#include <cuda_pipeline.h>\n#include <cuda_runtime.h>\n"
TENSOR_INCLUDE = "#include <cuda_fp16.h>\n#include <mma.h>\n"
PARAMETERS = "int, int, int, const float *, const float *, float *"
Kernel = tuple[int, int, Code, list[Code]]  # registers, local bytes, instructions, loops


def part(source: str, first: str, last: str) -> str:
    """The text of `source` from `first` to `last`, so that nvcc compiles no other kernels."""
    start = source.index(first)
    return source[start : source.index(last, start) + len(last)] + "\n"


# --8<-- [start:variant]
def variant(source: str, name: str, new_name: str, old: str, new: str) -> str:
    """The source of kernel `name` as a second kernel `new_name`, in which `old` is `new`."""
    start = source.index(f"[start:{name}]")
    body = source[source.index("__global__", start) :]
    body = body[: body.index("\n}\n") + 3]
    assert body.count(old) == 1 and new != old, f"{name}: {old!r} must occur once and change"
    renamed, times = re.subn(rf"\b{name}\(", f"{new_name}(", body)
    assert times == 1
    return "\n" + renamed.replace(old, new)


# --8<-- [end:variant]


def compiled(source: str) -> dict[str, Kernel]:
    """Kernels of `source`, by the beginning of their mangled names."""
    with tempfile.TemporaryDirectory() as folder:
        file, cubin = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        file.write_text(source, "utf-8")
        command = ["nvcc", "-O3", "-std=c++17", "-arch=sm_90", "-cubin", "-o", cubin, file]
        subprocess.run(command, check=True)
        return machine_code(cubin)


# --8<-- [start:positions]
def positions(loop: Code, multiply: str) -> tuple[int, int, int]:
    """Multiplications of a loop: all, those before the last load and before the first store."""
    seen, before_load, before_store = 0, 0, None
    for line in loop:
        if re.search(rf"\b{multiply}\b", line):
            seen += 1
        elif re.search(r"\bLDG\b", line):
            before_load = seen
        elif re.search(r"\bSTS\b", line) and before_store is None:
            before_store = seen
    assert before_store is not None
    return seen, before_load, before_store


# --8<-- [end:positions]


def find(kernels: dict[str, Kernel], name: str) -> Kernel:
    """The kernel whose mangled name contains `name` after its length."""
    (found,) = (k for mangled, k in kernels.items() if f"{len(name)}{name}" in mangled)
    return found


def main() -> None:
    names = ("sgemm.cu", "double_buffer.cu", "tensor_cores.cu")
    if sorted(sys.argv[1:]) != sorted(names):
        sys.exit(f"start it as: python instruction_order.py {' '.join(names)}")
    for name in names:
        if not Path(name).is_file():
            sys.exit(f"instruction_order.py: there is no file {name} here; copy it")
    if not shutil.which("nvcc"):
        sys.exit("instruction_order.py needs nvcc, of the CUDA toolkit (but no GPU)")
    sgemm, double_buffer, tensor_cores = (Path(name).read_text("utf-8") for name in names)

    syncwarp = "__syncwarp();                         // ... or the compiler moves it down ..."
    bound = (
        "for (int i = 0; i < TM; i++)\n#pragma unroll\n                for (int j = 0; j < TN;"
        " j++) sum[i][j] +="
    )
    device = INCLUDE + "".join(
        [
            part(sgemm, "__host__ __device__ constexpr int padded", "\n"),
            part(sgemm, "// --8<-- [start:float4]", "// --8<-- [end:float4]"),
            part(sgemm, "namespace tile {", "}  // namespace tile"),
            part(sgemm, "// --8<-- [start:tile_2d]", "// --8<-- [end:tile_2d]"),
            part(sgemm, "// --8<-- [start:double_buffered]", "// --8<-- [end:double_buffered]"),
        ]
    )
    device += variant(sgemm, "double_buffered", "not_synchronised", syncwarp, "")
    at_run_time = variant(sgemm, "tile_2d", "runtime_bound", bound, bound.replace("TM", "rows"))
    device += at_run_time.replace("float *C)", "float *C, int rows)")
    ladder = compiled(device)
    step = "multiply(a[now], b[now], y, x, sum);\n        next.store"
    device = TENSOR_INCLUDE + part(tensor_cores, "using Factor = __half;", "\n")
    device += part(tensor_cores, "namespace wmma", "// --8<-- [start:straight]")
    device += part(tensor_cores, "// --8<-- [start:tiles]", "using Kernel =")
    device = device.removesuffix("using Kernel =\n")
    later = step.replace("next", "__syncwarp();\n        next")
    tensor = compiled(device + variant(tensor_cores, "tiled", "synchronised", step, later))
    device = part(double_buffer, "constexpr int BM", "using Kernel =")
    device = device.removesuffix("using Kernel =\n")
    for stages in (2, 3, 4):
        device += f"\ntemplate __global__ void ahead<{stages}>({PARAMETERS});"
    ahead = compiled(INCLUDE + device)

    loops = {
        "double_buffered": (find(ladder, "double_buffered"), "FFMA"),
        "... without __syncwarp()": (find(ladder, "not_synchronised"), "FFMA"),
        "tiled": (find(tensor, "tiled"), "HMMA"),
        "... with __syncwarp()": (find(tensor, "synchronised"), "HMMA"),
    }
    print("                          multiplications of the loop:")
    print("kernel                           all  before the last load  before the first store")
    order = {}
    for name, ((_, local, _, bodies), multiply) in loops.items():
        loop = max(bodies, key=lambda body, word=multiply: count(rf"{word}\S*", body))
        order[name] = all_of_them, load, store = positions(loop, multiply)
        assert local == 0
        print(f"{name:24} {f'≈{all_of_them}':>6} {multiply} {f'≈{load}':>16} {f'≈{store}':>23}")
    # FFMA: 128 x 128 x 16 for 256 threads. HMMA: 16 x 8 x 16 each, a warp's 64 x 64 x 32
    assert order["double_buffered"][0] == 128 * 128 * 16 // 256
    assert order["tiled"][0] == 64 * 64 * 32 // (16 * 8 * 16)
    # the barrier for the compiler keeps the loads early, and does not keep the stores late
    moved = order["... without __syncwarp()"]
    assert order["double_buffered"][1] == 0 and moved[1] > 0.7 * moved[0]
    assert order["tiled"][1] == 0
    assert order["... with __syncwarp()"][2] == order["tiled"][2] < 0.6 * order["tiled"][0]
    assert loops["... with __syncwarp()"][0][2] != loops["tiled"][0][2]  # it is in the code
    assert order["double_buffered"][2] > 0.9 * order["double_buffered"][0]

    # each asynchronous copy moves 16 bytes to shared memory and bypasses the L1 cache
    copies = {line for k in ahead.values() for line in k[2] if "LDGSTS" in line}
    assert copies and all("LDGSTS.E.BYPASS.128" in line for line in copies)
    print("\nkernel                   threads  registers  local bytes  blocks on an SM")
    # the second template argument of `ahead`; nvcc mangles it in two ways
    fault = "ELNS_5FaultE0" if any("ELNS_5FaultE0" in k for k in ahead) else "EL5Fault0"
    resources = {
        f"ahead<{stages}>": (
            next(k for name, k in ahead.items() if f"aheadILi{stages}{fault}" in name),
            stages * 4 * (64 * 20 + 16 * 64),
        )
        for stages in (2, 3, 4)
    }
    resources["tile_2d"] = find(ladder, "tile_2d"), 2 * 4 * 128 * 8
    resources["... bound at run time"] = find(ladder, "runtime_bound"), 2 * 4 * 128 * 8
    blocks = {}
    for name, ((registers, local, _, _), shared) in resources.items():
        blocks[name] = blocks_per_sm(256, registers, shared, 90)
        print(
            f"{name:24} {256:7} {f'≈{registers}':>10} {f'≈{local}':>12}"
            f" {f'≈{blocks[name]}':>16}"
        )
    assert blocks["ahead<2>"] > blocks["ahead<3>"] == blocks["ahead<4>"]
    # 64 sums and 8 values of `left`, which a loop indexes at run time: no registers
    assert resources["tile_2d"][0][1] == 0
    assert resources["... bound at run time"][0][1] == 4 * (64 + 8)


if __name__ == "__main__":
    main()
