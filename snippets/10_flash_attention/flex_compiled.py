"""torch.compile turns flex_attention into one kernel: on a CPU in C++, on a GPU in Triton.

Without it the function stores all scores. Compiled, a sliding window skips its empty blocks.
"""

import os
import shutil
import statistics
import sys
import time
import warnings

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # one kernel: no pool of compilers

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

S, WINDOW = 2048, 256


def sliding(b, h, q, k):
    return (q >= k) & (q - k < WINDOW)


def median_ms(function, calls: int = 5) -> float:
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def main() -> None:
    if not torch.cuda.is_available() and shutil.which("g++") is None:
        sys.exit("torch.compile needs a C++ compiler here: install g++")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 1, S, 64, device=device) for _ in range(3))
    # --8<-- [start:compiled]
    block_mask = create_block_mask(sliding, None, None, S, S, device)
    compiled = torch.compile(flex_attention, fullgraph=True)
    out = compiled(q, k, v, block_mask=block_mask)
    # --8<-- [end:compiled]
    mask = create_mask(sliding, None, None, S, S, device)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eager = median_ms(lambda: flex_attention(q, k, v, block_mask=block_mask), calls=1)
    print(str(caught[0].message).split("\n")[0].replace(" - ", " -\n    "))
    print(f"{S} tokens, window {WINDOW}: {block_mask.sparsity():.1f}% of the blocks are empty")
    print(f"{'flex, eager':17} ≈{eager:.1f} ms")
    ways = {
        "SDPA, dense mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "flex, compiled": lambda: compiled(q, k, v, block_mask=block_mask),
    }
    for name, way in ways.items():
        print(f"{name:17} ≈{median_ms(way):.1f} ms")
    print("all three agree")


if __name__ == "__main__":
    main()
