"""This program times our Triton kernels and the best backend of SDPA on a GPU.

Start it with the two kernel programs as arguments. The inputs are bf16 with 16,384 tokens in
total and heads times d = 2,048. TFLOP/s use the usual count of FLOPs: 4s²d per head in forward,
2.5 times as many in backward, and half of each if causal. The program compares outputs and
gradients before it times anything.
"""

import importlib.util
import sys
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def load(path: str):
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BACKENDS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
]


# --8<-- [start:best]
def best_of_library(q, k, v, do, causal: bool, bench) -> dict[str, tuple[float, str]]:
    """Return the time in ms and the name of the fastest backend that accepts the inputs."""
    times = {"forward": [], "backward": []}
    for backend in BACKENDS:
        with sdpa_kernel(backend):
            try:
                out = scaled_dot_product_attention(q, k, v, is_causal=causal)
            except RuntimeError:  # "No available kernel": this backend rejects the inputs
                continue
            name = backend.name.removesuffix("_ATTENTION").lower()
            call = partial(scaled_dot_product_attention, q, k, v, is_causal=causal)
            times["forward"].append((bench(call), name))
        back = partial(torch.autograd.grad, out, (q, k, v), do, retain_graph=True)
        times["backward"].append((bench(back), name))
    return {which: min(found) for which, found in times.items()}


# --8<-- [end:best]


def row(forward, backward, bench, s: int, d: int, causal: bool) -> str:
    """Compare the results of one case, time it, and return its row of the table."""
    batch, heads = 16384 // s, 2048 // d
    torch.manual_seed(0)
    q, k, v, do = (
        torch.randn(batch * s, heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * s
    run = partial(forward.attention, q, k, v, starts, causal, longest=s)
    o, lse = run()
    run_back = partial(backward.backward, q, k, v, o, lse, do, starts, causal, longest=s)
    theirs = [t.view(batch, s, heads, d).transpose(1, 2) for t in (q, k, v, do)]
    leaves = [t.detach().requires_grad_() for t in theirs[:3]]
    out = scaled_dot_product_attention(*leaves, is_causal=causal)
    expected = (out, *torch.autograd.grad(out, leaves, theirs[3]))
    for ours, reference in zip((o, *run_back()), expected, strict=True):
        flat = reference.transpose(1, 2).reshape(ours.shape)
        assert (ours.float() - flat.float()).norm() < 0.02 * flat.float().norm()
    library = best_of_library(*leaves, theirs[3], causal, bench)
    flops = 4 * s * s * d * heads * batch / (2 if causal else 1)
    cells = []
    for which, call, factor in (("forward", run, 1), ("backward", run_back, 2.5)):
        ms, (best, name) = bench(call), library[which]
        rate = factor * flops / ms / 1e9
        cells.append(f"≈{rate:.0f} TFLOP/s, ≈{100 * best / ms:.0f}% of {name}")
    return f"{s:5}  {d:3}  {causal!s:6}   " + "   ".join(cells)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("speed_table.py times kernels on a GPU, and there is none here")
    if len(sys.argv) != 3:
        sys.exit("start it as: python speed_table.py triton_forward.py triton_backward.py")
    import triton

    forward, backward = (load(path) for path in sys.argv[1:])
    bench = partial(triton.testing.do_bench, return_mode="median")
    print("    s    d  causal   forward: ours, best of SDPA     backward: ours, best of SDPA")
    for s in (16384, 4096, 1024):  # tuned at the longest length, then used for all lengths
        for d in (64, 128):
            for causal in (False, True):
                print(row(forward, backward, bench, s, d, causal))


if __name__ == "__main__":
    main()
