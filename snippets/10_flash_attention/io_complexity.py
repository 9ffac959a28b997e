"""With twice the fast memory, attention in tiles moves about half the elements.

The program predicts the elements that move into and out of a fast memory of M elements. Then it
counts them for two orders of the loops. With the queries outside (FlashAttention-2), a tile of
queries and its output stay, while keys and values pass: 2sd(1 + s/Br). With the keys outside
(FlashAttention), a tile of keys and values stays, while queries and outputs come and go. Draws
io_complexity.svg.
"""

import math

import torch

S, D, NARROW = 512, 32, 4  # NARROW: rows of the tile that passes


# --8<-- [start:fast]
class FastMemory:
    """Counts the elements that cross, and fails if it stores more than `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held, self.moved = capacity, 0, 0

    def make(self, *shape: int) -> torch.Tensor:
        self.held += math.prod(shape)
        assert self.held <= self.capacity, f"{self.held} elements do not fit in {self.capacity}"
        return torch.zeros(*shape)

    def load(self, source: torch.Tensor) -> torch.Tensor:
        self.moved += source.numel()
        return self.make(*source.shape).copy_(source)

    def store(self, tile: torch.Tensor, target: torch.Tensor) -> None:
        self.moved += tile.numel()
        target.copy_(tile)

    def drop(self, *tiles: torch.Tensor) -> None:
        self.held -= sum(t.numel() for t in tiles)


# --8<-- [end:fast]


def update(fast, q, k, v, m, total, out) -> None:
    """Add one tile in place. It needs memory for the scores and for one more vector."""
    p, new = fast.make(q.shape[0], k.shape[0]), fast.make(q.shape[0])
    torch.matmul(q, k.T, out=p)
    torch.maximum(m, torch.amax(p, -1, out=new), out=new)
    p.sub_(new[:, None]).exp_()
    shrink = m.sub_(new).exp_()  # overwrites the old maximum
    out.mul_(shrink[:, None]).addmm_(p, v)
    total.mul_(shrink).add_(torch.sum(p, -1, out=m))
    m.copy_(new)
    fast.drop(p, new)


# --8<-- [start:orders]
def query_tile(m_elements: int) -> int:
    """Return the number of rows of q and out that fit next to the other tiles."""
    return (m_elements - 2 * NARROW * D) // (2 * D + NARROW + 3)


def key_tile(m_elements: int) -> int:
    return (m_elements - NARROW * (2 * D + 3)) // (2 * D + NARROW)


def queries_outside(q, k, v, o, m_elements: int) -> tuple[int, int]:
    """Use the loops of FlashAttention-2. Return moved elements and queries per tile."""
    fast = FastMemory(m_elements)
    br, bc = query_tile(m_elements), NARROW
    for i in range(0, len(q), br):
        qi = fast.load(q[i : i + br])
        out, m, total = fast.make(*qi.shape), fast.make(len(qi)), fast.make(len(qi))
        m.fill_(-torch.inf)
        for j in range(0, len(k), bc):
            kj, vj = fast.load(k[j : j + bc]), fast.load(v[j : j + bc])
            update(fast, qi, kj, vj, m, total, out)
            fast.drop(kj, vj)
        fast.store(out.div_(total[:, None]), o[i : i + br])
        fast.drop(qi, out, m, total)
    return fast.moved, br


def keys_outside(q, k, v, o, m_elements: int) -> tuple[int, int]:
    """Use the loops of FlashAttention. Return moved elements and keys per tile."""
    fast = FastMemory(m_elements)
    br, bc = NARROW, key_tile(m_elements)
    m_all = torch.full((len(q),), -torch.inf)  # not in the fast memory, like o
    total_all = torch.zeros_like(m_all)
    o.zero_()
    for j in range(0, len(k), bc):
        kj, vj = fast.load(k[j : j + bc]), fast.load(v[j : j + bc])
        for i in range(0, len(q), br):
            rows = slice(i, i + br)
            tiles = [fast.load(t[rows]) for t in (q, o, m_all, total_all)]
            qi, out, m, total = tiles
            update(fast, qi, kj, vj, m, total, out)
            for tile, home in ((out, o), (m, m_all), (total, total_all)):
                fast.store(tile, home[rows])
            fast.drop(*tiles)
        fast.drop(kj, vj)
    o.div_(total_all[:, None])
    fast.moved += 2 * o.numel() + len(o)  # the last division reads and writes o again
    return fast.moved, bc


# --8<-- [end:orders]


def draw(rows: list[tuple[int, int, int]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "io", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    ms = [m for m, _, _ in rows]
    tiles = [(query_tile(m), key_tile(m)) for m in ms]
    axes.plot(ms, [2 * S * D * (1 + S / br) for br, _ in tiles], color="#0b6e99", linewidth=2)
    axes.plot(ms, [S * D * (4 + 3 * S / bc) for _, bc in tiles], color="#c2410c", linewidth=2)
    axes.plot(ms, [a for _, a, _ in rows], "o", color="#0b6e99")
    axes.plot(ms, [b for _, _, b in rows], "s", color="#c2410c")
    axes.axhline(4 * S * S + 4 * S * D, color="#52525b", linewidth=1.2, linestyle="--")
    axes.axhline(4 * S * D, color="#15803d", linewidth=1.2, linestyle="--")
    axes.text(3.2e4, 1.2e6, "plain: 4s² + 4sd", color="#52525b", ha="right")
    axes.text(1000, 5.2e4, "each tensor once: 4sd", color="#15803d", va="top")
    axes.text(5400, 5.2e5, "keys outside: sd(4 + 3s/Bc)", color="#c2410c")
    axes.text(2600, 2.2e5, "queries outside:\n2sd(1 + s/Br)", color="#0b6e99", ha="right")
    axes.set(xscale="log", yscale="log", xlabel="fast memory M, elements")
    axes.set(ylabel="elements moved", ylim=(3.5e4, 3e6))
    axes.set_xticks([1024, 4096, 16384], ["1k = d²", "4k", "16k"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("io_complexity.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(S, D) for _ in range(3))
    truth = ((q.double() @ k.double().T).softmax(-1) @ v.double()).float()
    fast = FastMemory(7)
    tile, _ = fast.make(2, 3), fast.make(1)
    fast.drop(tile)
    assert fast.held == 1
    print(f"s = {S}, d = {D}; plain attention moves {4 * S * S + 4 * S * D:,} elements")
    print("            queries outside                keys outside")
    print("      M   tile   counted  4s²d²/M      tile    counted  6s²d²/M")
    rows = []
    for m in (1024, 2048, 4096, 8192, 16384, 32768):
        o = torch.empty(S, D)
        ours, br = queries_outside(q, k, v, o, m)
        torch.testing.assert_close(o, truth, rtol=1e-4, atol=1e-5)
        theirs, bc = keys_outside(q, k, v, o, m)
        torch.testing.assert_close(o, truth, rtol=1e-4, atol=1e-5)
        passes, key_passes = math.ceil(S / br), math.ceil(S / bc)
        assert ours == 2 * S * D + passes * 2 * S * D
        assert theirs == 2 * S * D + key_passes * (3 * S * D + 4 * S) + 2 * S * D + S
        print(
            f"{m:7,} {br:6} {ours:9,} {4 * (S * D) ** 2 // m:8,}    {bc:6} {theirs:10,}"
            f" {6 * (S * D) ** 2 // m:8,}"
        )
        rows.append((m, ours, theirs))
    draw(rows)


if __name__ == "__main__":
    main()
