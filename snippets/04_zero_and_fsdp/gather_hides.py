"""How many tokens hide the communication of ZeRO-3, for real GPUs and links: T = P/W.

Forward needs 2ΨT FLOPs, and meanwhile 2 bytes per parameter arrive. Backward needs 4ΨT FLOPs.
Meanwhile 2 bytes per parameter arrive, and g bytes per gradient leave. Ψ cancels:

    forward  T ≥ P/W        backward  T ≥ (2 + g)/4 · P/W

T is the number of tokens that a GPU processes in one forward pass, and P the FLOP/s that the
GPU reaches. W is the bandwidth, in bytes/s and in one direction, of the slowest link in the
ring. Inside a node this link is NVLink. Between nodes it is all network cards of a node
together. The peaks are those of NVIDIA's datasheets (dense bf16). Their NVLink bandwidth
counts both directions, so W is half.

The first two columns use the W of the datasheet. The last two columns use 82% of it, which is
the rate that a ring reaches on an H100: 370 of 450 GB/s. For the other links, 82% is an
assumption. Only the H100 with NVLink was measured.

The formula is compared with a simulation of a model with 32 layers, which sends one message
after the other.
"""

REACHED = 0.4  # fraction of the peak in a good run; Llama 3 405B reports 0.41 to 0.43
RING = 370 / 450  # fraction of the datasheet's W; github.com/NVIDIA/nccl-tests/issues/212
LAYERS = 32

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


def tokens_forward(flops: float, bandwidth: float) -> float:
    """Return the tokens per GPU for which forward takes as long as its all-gathers in bf16."""
    return flops / bandwidth


def tokens_backward(flops: float, bandwidth: float, gradient_bytes: int) -> float:
    """Return the tokens per GPU for which backward takes as long as its communication."""
    return (2 + gradient_bytes) / 4 * flops / bandwidth


def exposed(
    tokens: float,
    flops: float,
    bandwidth: float,
    gradient_bytes: int,
    n: int,
    parameters: float,
) -> tuple[float, float]:
    """Simulate forward and backward. Return how long the GPU waits in each.

    The link sends the messages in the order of the calls. The all-gather of a unit is issued
    when the previous unit begins to compute. The reduce-scatter of a unit is issued when the
    backward of this unit has ended.
    """
    layer = parameters / LAYERS
    message = layer / n  # elements; a ring sends n - 1 of them, one after the other
    waits = []
    for flops_per_token, reduces in ((2, False), (4, True)):
        compute = flops_per_token * layer * tokens / flops
        link = gpu = waited = 0.0
        arrived = [0.0] * (LAYERS + 1)
        for _ in range(n - 1):
            link += 2 * message / bandwidth
        arrived[0] = link
        for unit in range(LAYERS):
            begin = max(gpu, arrived[unit])
            waited, gpu = waited + begin - gpu, begin + compute
            if unit + 1 < LAYERS:
                link = max(link, begin)
                for _ in range(n - 1):
                    link += 2 * message / bandwidth
                arrived[unit + 1] = link
            if reduces:
                link = max(link, gpu)
                for _ in range(n - 1):
                    link += gradient_bytes * message / bandwidth
        waits.append(waited + max(0.0, link - gpu))
    return waits[0], waits[1]


def check(flops: float, bandwidth: float) -> None:
    """Compare the thresholds with the simulation, for two models, two rings and two dtypes."""
    for parameters, n in ((1e9, 2), (70e9, 64)):
        ring = (n - 1) / n
        gather = ring * 2 * parameters / LAYERS / bandwidth  # seconds, one layer
        for g in (2, 4):
            reduce = ring * g * parameters / LAYERS / bandwidth
            # the formula leaves out (n - 1)/n, so its number of tokens is slightly too large
            enough = max(tokens_forward(flops, bandwidth), tokens_backward(flops, bandwidth, g))
            forward, backward = exposed(enough, flops, bandwidth, g, n, parameters)
            assert forward <= 1.001 * gather  # only the first gather is exposed
            assert backward <= 1.001 * (gather + reduce)  # and the last reduce-scatter
            # with 10% fewer tokens than the ring really needs, every layer waits
            few = 0.9 * ring * tokens_forward(flops, bandwidth)
            forward, _ = exposed(few, flops, bandwidth, g, n, parameters)
            assert forward > 2 * gather
            few = 0.9 * ring * tokens_backward(flops, bandwidth, g)
            _, backward = exposed(few, flops, bandwidth, g, n, parameters)
            assert backward > 2 * (gather + reduce)


def main() -> None:
    print("tokens per GPU and pass     W of the datasheet        82% of it")
    print("gradients                      bf16       fp32       bf16       fp32")
    for name, (peak, nvlink) in GPUS.items():
        links = {"NVLink": nvlink}
        links |= {f"{rate} a node": min(nvlink, network) for rate, network in NETWORK.items()}
        for link, datasheet in links.items():
            flops = REACHED * peak
            cells = []
            for bandwidth in (datasheet, RING * datasheet):
                check(flops, bandwidth)
                cells.append(tokens_forward(flops, bandwidth))  # backward with bf16: the same
                cells.append(tokens_backward(flops, bandwidth, 4))
            print(f"{name + ', ' + link:25}" + "".join(f"{tokens:11,.0f}" for tokens in cells))


if __name__ == "__main__":
    main()
