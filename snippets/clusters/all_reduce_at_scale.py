"""Computes the time of an all-reduce on 8 to 131,072 ranks by formula and by simulation.

The simulation has a clock for each rank. A rank starts its next step when its own last message
and the message of its partner have arrived. A message of B bytes takes α + βB seconds; with
jitter, an exponential delay is added. The program simulates every message on up to 1,024 ranks,
and uses only the formulas for larger clusters. Links (assumed): 10 µs and 50 GB/s between
nodes, 3 µs and 400 GB/s between the eight GPUs of a node. Draws all_reduce_at_scale.svg.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

NET, NODE = (10e-6, 1 / 50e9), (3e-6, 1 / 400e9)  # (α in s, β in s per byte)
G = 8  # GPUs in a node, each with a network card of its own
ALGORITHMS = ("ring", "tree", "halving and doubling", "hierarchical")


# --8<-- [start:clocks]
def ring(clocks: torch.Tensor, size: float, link: tuple, jitter: float) -> torch.Tensor:
    """2(n-1) steps; in each step, every rank waits for the message of its left neighbour."""
    n = len(clocks)
    for _ in range(2 * (n - 1)):
        clocks = torch.maximum(clocks, clocks.roll(1)) + message(n, size / n, link, jitter)
    return clocks


def tree(clocks: torch.Tensor, size: float, link: tuple, jitter: float) -> torch.Tensor:
    """Pairs at distance 1, 2, 4, … add towards rank 0; the sum returns in reverse order."""
    n = len(clocks)
    rounds = [2**k for k in range(n.bit_length() - 1)]
    for distance in rounds + rounds[::-1]:
        low = torch.arange(0, n, 2 * distance)  # receives on the way up, sends on the way down
        both = torch.maximum(clocks[low], clocks[low + distance])
        both += message(len(low), size, link, jitter)
        clocks = clocks.index_put((low,), both).index_put((low + distance,), both)
    return clocks


def halving_and_doubling(
    clocks: torch.Tensor, size: float, link: tuple, jitter: float
) -> torch.Tensor:
    """log2 n swaps with the rank n/2, n/4, … 1 away, each of half the size; then back."""
    n = len(clocks)
    rounds = [(2**k, size * 2**k / n) for k in reversed(range(n.bit_length() - 1))]
    for distance, sent in rounds + rounds[::-1]:
        partner = clocks[torch.arange(n) ^ distance]
        clocks = torch.maximum(clocks, partner) + message(n, sent, link, jitter)
    return clocks


def hierarchical(clocks: torch.Tensor, size: float, link: tuple, jitter: float) -> torch.Tensor:
    """Reduce-scatter in the node, all-reduce of an eighth between nodes, all-gather inside."""
    nodes = clocks.view(-1, G)
    for half in range(2):
        for _ in range(G - 1):
            step = message(len(clocks), size / G, NODE, jitter=0).view(-1, G)
            nodes = torch.maximum(nodes, nodes.roll(1, dims=1)) + step
        if half == 0:  # GPU i of every node reduces with GPU i of the other nodes
            rails = [
                halving_and_doubling(nodes[:, i], size / G, link, jitter) for i in range(G)
            ]
            nodes = torch.stack(rails, dim=1)
    return nodes.flatten()


def message(n: int, sent: float, link: tuple, jitter: float) -> torch.Tensor:
    alpha, beta = link
    late = jitter * torch.empty(n, dtype=torch.float64).exponential_() if jitter else 0.0
    return torch.full((n,), alpha + beta * sent, dtype=torch.float64) + late


# --8<-- [end:clocks]


# --8<-- [start:formulas]
def formula(name: str, n: int, size: float) -> float:
    alpha, beta = NET
    if name == "ring":
        return 2 * (n - 1) * (alpha + beta * size / n)
    if name == "tree":
        return 2 * math.log2(n) * (alpha + beta * size)
    if name == "halving and doubling":
        return 2 * math.log2(n) * alpha + 2 * (n - 1) / n * beta * size
    inside = 2 * (G - 1) * (NODE[0] + NODE[1] * size / G)
    return inside + formula("halving and doubling", max(n // G, 1), size / G)


# --8<-- [end:formulas]


def ends(name: str, clocks: torch.Tensor, size: float, jitter: float = 0.0) -> torch.Tensor:
    """Times at which the ranks have the sum, if they begin at the times in `clocks`."""
    return globals()[name.replace(" ", "_")](clocks, size, NET, jitter)


def simulate(name: str, n: int, size: float, jitter: float = 0.0) -> float:
    return ends(name, torch.zeros(n, dtype=torch.float64), size, jitter).max().item()


def human(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def draw(size: float) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "scale", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.2))
    sizes = [2**k for k in range(3, 18)]
    for name, colour in zip(
        ALGORITHMS, ("#c2410c", "#a16207", "#0b6e99", "#7c3aed"), strict=True
    ):
        axes.plot(sizes, [1e3 * formula(name, n, size) for n in sizes], color=colour, lw=2)
        for n in (8, 32, 128, 512):
            axes.plot(n, 1e3 * simulate(name, n, size), "o", color=colour, markersize=5)
    axes.text(5.5e4, 1700, "ring", color="#c2410c", ha="right")
    axes.text(220, 400, "tree", color="#a16207", ha="right")
    axes.text(1.3e5, 53, "halving and doubling", color="#0b6e99", ha="right")
    axes.text(1.3e5, 12, "hierarchical", color="#7c3aed", ha="right")
    axes.set(xscale="log", yscale="log", xlabel="ranks")
    axes.set_ylabel(f"all-reduce of {size / 1e9:g} GB (ms)")
    axes.set_xticks([8, 64, 512, 4096, 32768, 131072], [8, 64, 512, 4096, 32768, 131072])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("all_reduce_at_scale.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("all-reduce of 1 GB: formula, simulated with every message")
    for name in ALGORITHMS:
        cells = []
        for n in (8, 128, 1024):
            predicted, seen = formula(name, n, 1e9), simulate(name, n, 1e9)
            assert math.isclose(predicted, seen, rel_tol=1e-9), (name, n)
            cells.append(f"{n}: {human(predicted)} {human(seen)}")
        for late in (0, 65, 127):  # no rank has the sum before the last has begun
            clocks = torch.zeros(128, dtype=torch.float64)
            clocks[late] = 1000
            assert ends(name, clocks, 1e9).min() > 1000, (name, late)
        print(f"  {name:21} {'   '.join(cells)}")
    print("by formula only:                       1 MB       1 GB")
    for n in (16_384, 131_072):
        for name in ALGORITHMS:
            small, large = (human(formula(name, n, size)) for size in (1e6, 1e9))
            print(f"  {n:7,} {name:21} {small:>10} {large:>10}")

    print("with exponential jitter of 5 µs per message on average (1 KB, 1,024 ranks):")
    n, jitter, size = 1024, 5e-6, 1e3
    for name, steps in (("ring", 2 * (n - 1)), ("halving and doubling", 2 * 10)):
        extra = simulate(name, n, size, jitter) - formula(name, n, size)
        print(
            f"  {name}: each of {steps} steps takes "
            f"≈{extra / steps / jitter:.2f} mean delays longer"
        )
        if name == "ring":
            # last-passage percolation: a chain of maxima grows by 2 per step, not by 1
            assert 1.8 < extra / steps / jitter < 2.1
        else:
            assert 2.1 < extra / steps / jitter < 3.5
    everyone = sum(1 / k for k in range(1, n + 1))
    print(f"  a barrier after every step would cost {everyone:.2f} mean delays per step")
    draw(1e9)


if __name__ == "__main__":
    main()
