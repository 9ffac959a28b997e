"""Softmax of rows in Helion: PyTorch's operators on a tile of rows become a Triton kernel.

Without a GPU, the program prints the Triton kernel that Helion generates, compiles it for
sm_90, runs its PTX on the CPU and prints what the machine code uses. On a GPU, it checks the
kernel and measures its speed.

It needs helion: pip install -r requirements/helion.txt
"""

import importlib.util
import sys
import tempfile
from pathlib import Path

from softmax_problem import WIDTHS, Binary, run_program

try:
    import helion
    import helion.language as hl
except ImportError:
    sys.exit("this program needs Helion: pip install -r requirements/helion.txt")
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


# --8<-- [start:kernel]
def rows_of_softmax(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        tile = x[rows, :]
        e = torch.exp(tile - tile.amax(dim=1, keepdim=True))
        y[rows, :] = e / e.sum(dim=1, keepdim=True)
    return y


# A configuration. Without one, the first call on a GPU measures many and keeps the fastest.
CONFIG = helion.Config(block_sizes=[1], num_warps=8)
softmax = helion.kernel(rows_of_softmax, config=CONFIG)
# --8<-- [end:kernel]


# --8<-- [start:compiled]
def compiled(rows: int, columns: int) -> dict[str, Binary]:
    """Generate the Triton kernel for CONFIG, and compile it with Triton."""
    text = softmax.bind((torch.empty(rows, columns),)).to_triton_code(CONFIG)
    if columns == WIDTHS[-1]:
        kernel = text[text.index("@triton.jit") : text.index("def rows_of_softmax")].strip()
        print(f"generated for rows of {columns}:\n{kernel}\n")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "generated.py")
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("generated", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        types = {"x": "*fp32", "y": "*fp32", "_RDIM_SIZE_1": "constexpr"}
        sizes = {"_RDIM_SIZE_1": triton.next_power_of_2(columns)}
        promises = {(i,): [["tt.divisibility", 16]] for i in range(2)}
        source = ASTSource(module._helion_rows_of_softmax, types, sizes, promises)
        target = GPUTarget("cuda", 90, 32)
        built = triton.compile(source, target=target, options={"num_warps": 8})
    binary = Binary(built.asm["cubin"], built.asm["ptx"], (0, 0), built.metadata.shared)
    return {"Helion": binary}


# --8<-- [end:compiled]


if __name__ == "__main__":
    run_program({"Helion": softmax}, compiled)
