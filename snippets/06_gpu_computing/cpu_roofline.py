"""The roofline of your machine: two measurements give the least time of six operations.

A large copy measures the bandwidth W, and a large product measures the peak P. An operation
that does F FLOPs and moves B bytes should then take at least max(F / P, B / W). Look at the
column `of the roof`: it compares this bound with the measured time. The program counts B and
the FLOPs of products inside the very calls that it times. The last lines count the bytes of a
softmax that is built from five calls. Runs on one core of the CPU, or on a GPU if there is one.
"""

import math
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


# --8<-- [start:traffic]
class Traffic(TorchDispatchMode):
    """Counts the bytes of the tensors that each operator reads or writes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if torch.is_tensor(t)]
        # a result that is written to `out` is an argument, too: count it once
        self.bytes += sum(t.nbytes for t in {id(t): t for t in tensors}.values())
        return result


# --8<-- [end:traffic]


def bytes_of(call) -> int:
    """Return the bytes that the operators of one call read and write."""
    with Traffic() as traffic:
        call()
    return traffic.bytes


def flops_of(call) -> int:
    """Return the FLOPs of the matrix products in one call, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def softmax_of_five_calls(x: torch.Tensor) -> torch.Tensor:
    shifted = x - x.amax(-1, keepdim=True)
    exponentials = shifted.exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def least_seconds(flops: float, moved: float, peak: float, bandwidth: float) -> float:
    """Return the roofline's bound: FLOPs and bytes can overlap, so the longer time decides."""
    return max(flops / peak, moved / bandwidth)


def seconds(device: torch.device, calls: dict, rounds: int = 6) -> dict[str, float]:
    """Return the least time of each call. The calls take turns, so that all are disturbed."""
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
    a, b, small, other = (torch.randn(m, m, device=device) for m in (512, 512, 128, 128))
    n, h = x.numel(), 4096
    rows = {  # FLOPs, bytes, the call
        "copy": (0, 8 * n, lambda: out.copy_(x)),  # a read and a write of 4 bytes
        "matmul 512³": (2 * 512**3, 12 * 512**2, lambda: a @ b),
        "vector add": (n, 12 * n, lambda: torch.add(x, y, out=out)),
        "softmax": (5 * n, 8 * n, lambda: torch.softmax(x, -1, out=out)),
        "exp": (n, 8 * n, lambda: torch.exp(x, out=out)),
        "matrix times vector": (2 * n, 4 * (n + h + n // h), lambda: x @ v),
        "times 16 vectors": (32 * n, 4 * (n + 16 * (h + n // h)), lambda: x @ wide),
        "matmul 128³": (2 * 128**3, 12 * 128**2, lambda: small @ other),
    }
    for name, (flops, moved, call) in rows.items():
        assert bytes_of(call) == moved, name
        if "matmul" in name or "16" in name:
            assert flops_of(call) == flops, name
    # a second of FLOPs and a second of bytes fit into one second
    assert least_seconds(3, 5, 3, 5) == 1 and least_seconds(6, 5, 3, 5) == 2
    assert flops_of(lambda: x @ v[:, None]) == rows["matrix times vector"][0]
    took = seconds(device, {name: call for name, (_, _, call) in rows.items()})

    # --8<-- [start:roof]
    bandwidth = rows["copy"][1] / took["copy"]
    peak = rows["matmul 512³"][0] / took["matmul 512³"]
    print(f"copy ≈{bandwidth / 1e9:.1f} GB/s, product of 512³ ≈{peak / 1e9:.0f} GFLOP/s")
    print(f"ridge ≈{peak / bandwidth:.1f} FLOPs per byte")
    print("operation            FLOP/B   predicted    measured   of the roof")
    for name in list(rows)[2:]:
        flops, moved, _ = rows[name]
        least = least_seconds(flops, moved, peak, bandwidth)
        print(
            f"{name:20} {flops / moved:6.2f}  ≈{1e3 * least:6.3f} ms"
            f"  ≈{1e3 * took[name]:6.3f} ms  ≈{least / took[name]:.0%}"
        )
    # --8<-- [end:roof]
    reached = {name: flops / took[name] for name, (flops, _, _) in rows.items()}
    # the reason for the whole picture: the same unit waits for its data
    assert reached["matrix times vector"] < peak / 2
    assert reached["vector add"] < peak / 10
    print(
        "vector add stays below a tenth of the product's FLOP/s, matrix times vector below half"
    )
    part = x[:64]  # what fusion saves does not depend on the machine, nor on the number of rows
    torch.testing.assert_close(softmax_of_five_calls(part), torch.softmax(part, -1))
    fused = bytes_of(lambda: torch.softmax(part, -1)) / part.numel()
    apart = bytes_of(lambda: softmax_of_five_calls(part)) / part.numel()
    assert fused == 8 and 32 < apart < 32.01  # the maxima and the sums are small
    print(f"softmax: one call moves {fused:.0f} bytes for each number, five calls {apart:.0f}")


if __name__ == "__main__":
    main()
