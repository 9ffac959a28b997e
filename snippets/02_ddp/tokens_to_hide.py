"""How many tokens per GPU a backward pass needs so that it lasts as long as the all-reduce.

Backward needs 4 FLOPs per parameter and token. A ring all-reduce sends at most 2 gradient
values per parameter from each rank. Both times grow with the number of parameters, which
cancels:

    4ΨT / P  ≥  2gΨ / W    ⇔    T  ≥  g·P / (2W)

T is the number of tokens that a GPU processes in one backward pass, P the FLOP/s that the GPU
reaches, and g the bytes per gradient value. W is the bandwidth, in bytes/s and in one
direction, of the slowest link in the ring. Inside a node this link is NVLink. Between nodes it
is all network cards of a node together, because a ring enters and leaves each node once and
NCCL runs one ring for every card. A DGX H100 has eight cards with 400 Gb/s each. The peaks are
those of NVIDIA's datasheets (dense bf16). Their NVLink bandwidth counts both directions, so W
is half.
"""

import math

REACHED = 0.4  # fraction of the peak in a good run; Llama 3 405B reports 0.41 to 0.43

GPUS = {  # dense bf16 FLOP/s; NVLink bytes/s in one direction
    "A100": (312e12, 600e9 / 2),
    "H100": (989e12, 900e9 / 2),
    "B200": (2250e12, 1800e9 / 2),
}
NETWORK = {  # bytes/s that a whole node can send
    "8 × 400 Gb/s": 8 * 400e9 / 8,
    "400 Gb/s": 400e9 / 8,
    "100 Gb/s": 100e9 / 8,
}


def tokens_to_hide(flops: float, bandwidth: float, gradient_bytes: int) -> float:
    """Return the tokens per GPU for which backward takes as long as the all-reduce.

    `flops` are the FLOP/s that the GPU reaches. `bandwidth` is in bytes/s, in one direction.
    """
    return gradient_bytes * flops / (2 * bandwidth)


def check(tokens: float, flops: float, bandwidth: float, gradient_bytes: int) -> None:
    """Compare the two times for two sizes of the model and two sizes of the ring."""
    for parameters in (1e9, 70e9):
        backward = 4 * parameters * tokens / flops  # seconds
        for ranks in (2, 100_000):
            chunk = gradient_bytes * parameters / ranks  # a rank sends one chunk in each step
            all_reduce = 2 * (ranks - 1) * chunk / bandwidth  # in 2(N - 1) steps
            assert math.isclose(all_reduce, backward * (ranks - 1) / ranks)


def main() -> None:
    print("tokens per GPU in one backward   fp32 gradients  bf16 gradients")
    for name, (peak, nvlink) in GPUS.items():
        links = {"NVLink": nvlink}
        links |= {f"{rate} a node": min(nvlink, network) for rate, network in NETWORK.items()}
        for link, bandwidth in links.items():
            fp32, bf16 = (tokens_to_hide(REACHED * peak, bandwidth, g) for g in (4, 2))
            check(fp32, REACHED * peak, bandwidth, 4)
            check(bf16, REACHED * peak, bandwidth, 2)
            print(f"{name + ', ' + link:31}  {fp32:14,.0f}  {bf16:14,.0f}")


if __name__ == "__main__":
    main()
