"""How many tokens hide the all-gathers of ZeRO-3: T ≥ P/W, for real GPUs and links.

Forward computes 2ΨT FLOPs while the next unit's 2 bytes per parameter arrive; backward computes
4ΨT while 2 bytes arrive and g bytes of gradient leave. Ψ cancels:

    forward  T ≥ P/W        backward  T ≥ (2 + g)/4 · P/W

T tokens of a GPU per forward, P the FLOP/s it reaches, W bytes/s one way of the narrowest
border that the ring crosses: NVLink inside a node; between nodes all network cards of a node.
Peaks are from NVIDIA's datasheets (dense bf16; W is half of NVLink's figure for both ways).
"""

import math

REACHED = 0.4  # of the peak: a good run; Llama 3 405B reports 0.41 to 0.43 at s = 8,192

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


def tokens_forward(flops: float, bandwidth: float) -> float:
    """Tokens per GPU from which forward takes longer than its all-gathers in 16 bits."""
    return flops / bandwidth


def tokens_backward(flops: float, bandwidth: float, gradient_bytes: int) -> float:
    """The same for backward, with its all-gathers and its reduce-scatters."""
    return (2 + gradient_bytes) / 4 * flops / bandwidth


def main() -> None:
    print("tokens per GPU and pass          forward  backward, bf16  backward, fp32 gradients")
    for name, (peak, nvlink) in GPUS.items():
        links = {"NVLink": nvlink}
        links |= {f"{rate} a node": min(nvlink, network) for rate, network in NETWORK.items()}
        for link, bandwidth in links.items():
            flops = REACHED * peak
            forward = tokens_forward(flops, bandwidth)
            bf16, fp32 = (tokens_backward(flops, bandwidth, g) for g in (2, 4))
            psi, tokens = 8e9, forward  # at the threshold both take as long, for any Ψ
            assert math.isclose(2 * psi * tokens / flops, 2 * psi / bandwidth)
            assert math.isclose(4 * psi * fp32 / flops, 6 * psi / bandwidth)
            print(f"{name + ', ' + link:29}  {forward:9,.0f}  {bf16:14,.0f}  {fp32:24,.0f}")


if __name__ == "__main__":
    main()
