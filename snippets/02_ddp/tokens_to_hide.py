"""How much work hides the all-reduce: tokens per GPU in one backward, for real GPUs and links.

Backward costs 4 FLOPs per parameter and token. A ring all-reduce sends at most 2 gradients per
parameter from each rank. Both grow with the parameters, which cancel:

    4ΨT / P  ≥  2gΨ / W    ⇔    T  ≥  g·P / (2W)

T tokens of a GPU in the backward that communicates, P the FLOP/s a GPU reaches, g bytes per
gradient, W the bytes/s, one way, of the narrowest border that the ring crosses: NVLink inside a
node; between nodes all network cards of a node together, since a ring enters and leaves each
node once and NCCL runs a ring for every card. A DGX H100 has eight cards of 400 Gb/s. Peaks are
from NVIDIA's datasheets (dense bf16; NVLink's figure is for both ways, so W is half of it).
"""

REACHED = 0.4  # of the peak: a good training run; Llama 3 405B reports 0.41 to 0.43

GPUS = {  # dense bf16 FLOP/s; NVLink bytes/s each way
    "A100": (312e12, 600e9 / 2),
    "H100": (989e12, 900e9 / 2),
    "B200": (2250e12, 1800e9 / 2),
}
NETWORK = {  # bytes/s out of a whole node
    "8 × 400 Gb/s": 8 * 400e9 / 8,
    "400 Gb/s": 400e9 / 8,
    "100 Gb/s": 100e9 / 8,
}


def tokens_to_hide(flops: float, bandwidth: float, gradient_bytes: int) -> float:
    """Tokens per GPU from which backward takes longer than the all-reduce of its gradients.

    `flops` in FLOP/s as reached, `bandwidth` in bytes/s one way.
    """
    return gradient_bytes * flops / (2 * bandwidth)


def main() -> None:
    print("tokens per GPU in one backward   fp32 gradients  bf16 gradients")
    for name, (peak, nvlink) in GPUS.items():
        links = {"NVLink": nvlink}
        links |= {f"{rate} a node": min(nvlink, network) for rate, network in NETWORK.items()}
        for link, bandwidth in links.items():
            fp32, bf16 = (tokens_to_hide(REACHED * peak, bandwidth, g) for g in (4, 2))
            print(f"{name + ', ' + link:31}  {fp32:14,.0f}  {bf16:14,.0f}")


if __name__ == "__main__":
    main()
