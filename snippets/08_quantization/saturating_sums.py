"""Failure: int8 sums that saturate at 16 bits, by the instructions of an x86 without VNNI.

Its only instruction for bytes multiplies unsigned by signed ones, adds two products and clamps
the sum to int16. oneDNN makes the first factor unsigned by adding 128, and takes 128 times the
sum of the second away at the end: right unless a pair was clamped. VNNI adds in 32 bits.
"""

import os
import subprocess
import sys

import torch


# --8<-- [start:pairs]
def without_vnni(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[m, k] and [k, n] of int8, k even -> [m, n]: what pairs clamped to int16 add up to."""
    unsigned = a.long() + 128  # 0 … 255
    products = unsigned[:, :, None] * b.long()  # [m, k, n]
    pairs = products.unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
    return pairs.sum(1) - 128 * b.long().sum(0)


# --8<-- [end:pairs]


def factors() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """The worst case; normal numbers on the full range; and the same with 7 bits for one."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-60, 61, (4, *shape), generator=generator).sum(0).clamp(-127, 127)
            for shape in ((64, 1024), (1024, 128)))  # fmt: skip
    worst = torch.full((64, 1024), 127), torch.full((1024, 128), 127)
    cases = (("all 127", *worst), ("8 bits and 8", a, b), ("8 bits and 7", a, b.clamp(-64, 64)))
    return [(name, x.to(torch.int8), y.to(torch.int8)) for name, x, y in cases]


def report(product) -> list[str]:
    """For each pair of factors the first sum, and how many sums are not exact."""
    lines = []
    for name, a, b in factors():
        sums, exact = product(a, b).long(), a.long() @ b.long()
        lines.append(f"{name}: first sum {sums[0, 0].item():,}, of {exact[0, 0].item():,}; "
                     f"not exact {(sums != exact).double().mean().item():.1%}")  # fmt: skip
    return lines


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["child"]:
        print("\n".join(report(torch._int_mm)))
        return
    ours = report(without_vnni)
    print("\n".join(ours))
    assert "not exact 100.0%" in ours[0] and "not exact 0.0%" in ours[2]
    assert "not exact 0.0%" not in ours[1]

    # --8<-- [start:child]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # use nothing newer than AVX2
    command = [sys.executable, __file__, "child"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    # --8<-- [end:child]
    exact = report(lambda a, b: a.long() @ b.long())
    calls_onednn = torch.cpu._is_vnni_supported()  # else torch multiplies in a loop of its own
    assert child.stdout.splitlines() == (ours if calls_onednn else exact), child.stdout
    assert report(torch._int_mm) == exact
    print("torch._int_mm: exact; where it calls oneDNN, held to AVX2: the sums above")


if __name__ == "__main__":
    main()
