"""The roofline of your machine: two measurements predict the least time of six operations.

A large copy measures W and a large product P. For anything else max(F / P, B / W) is then the
least time, and what an operation really takes beside it tells how good its kernel is. Runs on
one core of the CPU, or on a GPU where there is one.
"""

import math
import time

import torch
from torch.utils.flop_counter import FlopCounterMode


def seconds(device: torch.device, calls: dict, rounds: int = 8) -> dict[str, float]:
    """Least time of each call, all of them in turn, so that no one has the quiet moment."""
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize = torch.accelerator.synchronize if device.type != "cpu" else int
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()  # without it, the clock would stop when the launch returns
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    device = torch.accelerator.current_accelerator(check_available=True)
    device = device or torch.device("cpu")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(4096, 4096, device=device)  # 64 MiB of fp32, [rows, h]
    y, out = torch.randn_like(x), torch.empty_like(x)
    v = torch.randn(4096, device=device)
    wide = torch.randn(4096, 16, device=device)
    a, small = (torch.randn(m, m, device=device) for m in (512, 128))
    n, h = x.numel(), 4096
    rows = {  # FLOPs, bytes, the call
        "copy": (0, 8 * n, lambda: out.copy_(x)),  # a read and a write of 4 bytes
        "matmul 512³": (2 * 512**3, 12 * 512**2, lambda: a @ a),
        "vector add": (n, 12 * n, lambda: torch.add(x, y, out=out)),
        "softmax": (5 * n, 8 * n, lambda: torch.softmax(x, -1, out=out)),
        "exp": (n, 8 * n, lambda: torch.exp(x, out=out)),
        "matrix times vector": (2 * n, 4 * (n + h + n // h), lambda: x @ v),
        "times 16 vectors": (32 * n, 4 * (n + 16 * (h + n // h)), lambda: x @ wide),
        "matmul 128³": (2 * 128**3, 12 * 128**2, lambda: small @ small),
    }
    assert rows["copy"][1] == x.nbytes + out.nbytes
    for name in ("matmul 512³", "times 16 vectors", "matmul 128³"):
        with FlopCounterMode(display=False) as counter:
            rows[name][2]()
        assert counter.get_total_flops() == rows[name][0]  # as torch counts them
    took = seconds(device, {name: call for name, (_, _, call) in rows.items()})

    # --8<-- [start:roof]
    bandwidth = rows["copy"][1] / took["copy"]
    peak = rows["matmul 512³"][0] / took["matmul 512³"]
    print(f"copy ≈{bandwidth / 1e9:.1f} GB/s, product of 512³ ≈{peak / 1e9:.0f} GFLOP/s")
    print(f"ridge ≈{peak / bandwidth:.1f} FLOPs per byte")
    print("operation            FLOP/B   predicted    measured   of the roof")
    for name in list(rows)[2:]:
        flops, moved, _ = rows[name]
        least = max(flops / peak, moved / bandwidth)
        left = flops / moved < peak / bandwidth  # of the ridge, where bytes decide
        assert least == (moved / bandwidth if left else flops / peak)
        print(
            f"{name:20} {flops / moved:6.2f}  ≈{1e3 * least:6.3f} ms"
            f"  ≈{1e3 * took[name]:6.3f} ms  ≈{least / took[name]:.0%}"
        )
    # --8<-- [end:roof]
    reached = {name: flops / took[name] for name, (flops, _, _) in rows.items()}
    # the reason for the whole picture: the same unit, starved
    assert reached["matrix times vector"] < peak / 2
    assert reached["vector add"] < peak / 10
    print(
        "vector add stays below a tenth of the product's FLOP/s, matrix times vector below half"
    )


if __name__ == "__main__":
    main()
