"""Failure: int8 sums saturate at 16 bits with the instructions of an x86 without VNNI.

Its instruction for bytes multiplies unsigned by signed bytes, adds two products and clamps the
sum to int16. oneDNN makes the first factor unsigned by adding 128, and subtracts 128 times the
sum of the second factor at the end. The result is right unless a pair was clamped. VNNI adds in
32 bits.
"""

import os
import subprocess
import sys

import torch


# --8<-- [start:pairs]
def without_vnni(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[m, k] and [k, n] of int8, k even -> [m, n]: sums of pairs, each clamped to int16."""
    unsigned = a.long() + 128  # 0 … 255
    products = unsigned[:, :, None] * b.long()  # [m, k, n]
    pairs = products.unflatten(1, (-1, 2)).sum(2).clamp(-(2**15), 2**15 - 1)
    return pairs.sum(1) - 128 * b.long().sum(0)


# --8<-- [end:pairs]


def factors() -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """The worst case; numbers with three standard deviations; and 7 bits for one factor."""
    generator = torch.Generator().manual_seed(0)

    def bell(limit: int, *shape: int) -> torch.Tensor:  # a sum of four uniform numbers
        uniform = torch.randint(-limit, limit + 1, (4, *shape), generator=generator)
        return uniform.sum(0).clamp(-127, 127)

    wide = bell(60, 64, 1024), bell(60, 1024, 128)
    cases = {
        "all 127": (torch.full((64, 1024), 127), torch.full((1024, 128), 127)),
        "deviation 67": wide,
        "deviation 47": (bell(40, 64, 1024), bell(40, 1024, 128)),
        "deviation 29": (bell(25, 64, 1024), bell(25, 1024, 128)),
        "67, in 7 bits": (wide[0], wide[1].clamp(-64, 64)),
    }
    return [(name, x.to(torch.int8), y.to(torch.int8)) for name, (x, y) in cases.items()]


def report(product) -> list[str]:
    """For each pair of factors: the first sum, the share of wrong sums, and their error."""
    lines = []
    for name, a, b in factors():
        sums, exact = product(a, b).long(), a.long() @ b.long()
        wrong = (sums != exact).double().mean().item()
        error = ((sums - exact).double().norm() / exact.double().norm()).item()
        lines.append(f"{name}: first sum {sums[0, 0].item():,}, exact {exact[0, 0].item():,}; "
                     f"{wrong:.1%} of the sums are wrong, by {error:.2%}")  # fmt: skip
    return lines


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["child"]:
        print("\n".join(report(torch._int_mm)))
        return
    ours = report(without_vnni)
    print("\n".join(ours))
    shares = [line.split("; ")[1] for line in ours]
    assert shares[0].startswith("100.0%")
    assert shares[4] == "0.0% of the sums are wrong, by 0.00%"
    # fewer pairs reach the limit if the numbers are smaller
    wide, middle, narrow = (float(share.split(" ")[-1].rstrip("%")) for share in shares[1:4])
    assert wide > 10 > 5 > middle > narrow == 0

    # --8<-- [start:child]
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # use nothing newer than AVX2
    command = [sys.executable, __file__, "child"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    # --8<-- [end:child]
    exact = report(lambda a, b: a.long() @ b.long())
    calls_onednn = torch.cpu._is_vnni_supported()  # else torch multiplies in a loop of its own
    assert child.stdout.splitlines() == (ours if calls_onednn else exact), child.stdout
    assert report(torch._int_mm) == exact
    print("torch._int_mm: exact; if it calls oneDNN and AVX2 is the limit: the sums above")


if __name__ == "__main__":
    main()
