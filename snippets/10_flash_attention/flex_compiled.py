"""This program shows that the compiled flex_attention skips the empty blocks of a mask.

torch.compile turns flex_attention into one kernel, in C++ on a CPU and in Triton on a GPU. To
see which blocks the kernel visits, the program sets the last 128 values to NaN. SDPA with a
dense mask multiplies them by a weight of zero in every row, and 0 · NaN is NaN.
"""

import os
import shutil
import statistics
import sys
import time

# one small kernel: no pool of compilers, no headers and probes compiled before it
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

S, WINDOW, BLOCK = 16384 if torch.cuda.is_available() else 2048, 256, 128


def sliding(b, h, q, k):
    return (q >= k) & (q - k < WINDOW)


def median_ms(function) -> float:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def main() -> None:
    cuda = torch.cuda.is_available()
    if not cuda and shutil.which("g++") is None:
        sys.exit("torch.compile needs a C++ compiler here: install g++")
    if not cuda and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        sys.exit(
            "FlexAttention is compiled for x86 CPUs with AVX2 and for GPUs: neither is here"
        )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = "cuda" if cuda else "cpu"
    q, k, v = (torch.randn(1, 1, S, 64, device=device) for _ in range(3))
    # --8<-- [start:compiled]
    block_mask = create_block_mask(sliding, None, None, S, S, device, BLOCK_SIZE=BLOCK)
    compiled = torch.compile(flex_attention, fullgraph=True)
    out = compiled(q, k, v, block_mask=block_mask)
    # --8<-- [end:compiled]
    mask = create_mask(sliding, None, None, S, S, device)
    assert mask.sum(-1).max() == WINDOW
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    assert (out - F.scaled_dot_product_attention(q, k, v)).abs().max() > 0.1
    print(f"{S} tokens, window {WINDOW}: {block_mask.sparsity():.1f}% of the blocks are empty")

    took = {}
    # --8<-- [start:poison]
    poisoned = v.clone()
    poisoned[:, :, -BLOCK:] = torch.nan  # by the mask, only the last queries may see these
    ways = {
        "SDPA, dense mask": lambda v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "flex, compiled": lambda v: compiled(q, k, v, block_mask=block_mask),
    }
    met = {name: way(poisoned).isnan().any(-1).sum().item() for name, way in ways.items()}
    # --8<-- [end:poison]
    assert met == {"SDPA, dense mask": S, "flex, compiled": BLOCK}
    first = v.clone()
    first[:, :, :BLOCK] = torch.nan  # later queries skip these keys: the window has passed them
    spoilt = ways["flex, compiled"](first).isnan().any(-1).sum()
    assert WINDOW + BLOCK - 1 <= spoilt <= WINDOW + BLOCK  # row 383 sees 128 to 383
    for name, way in ways.items():
        took[name] = median_ms(lambda way=way: way(v))
        print(f"{name:17} ≈{took[name]:.1f} ms   rows spoilt by the NaN: {met[name]}")
    fewer = 100 / (100 - block_mask.sparsity())
    faster = took["SDPA, dense mask"] / took["flex, compiled"]
    assert faster > 0.5
    print(f"blocks: {fewer:.1f} times fewer, time: ≈{faster:.1f} times less")


if __name__ == "__main__":
    main()
