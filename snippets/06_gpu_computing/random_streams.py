"""Check which seeds and generators give equal random numbers, and which give different ones.

Every line of the output is a statement that the program has checked. It uses the generator of
the default device, so the statements hold on a CPU and on a GPU, although the numbers differ.
Look at `seed + rank + epoch`: it gives fewer streams than there are pairs of rank and epoch.
"""

import hashlib
import itertools

import torch


def seed_for(*parts: object) -> int:
    """Return a seed of 63 bits, made of the seed of a run, a rank, an epoch, a purpose."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def main() -> None:
    gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if gpu else torch.device("cpu")

    def generator(seed: int) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed)

    def draw(g: torch.Generator, n: int = 1000) -> torch.Tensor:
        return torch.randn(n, generator=g, device=device)

    assert torch.equal(draw(generator(1)), draw(generator(1)))
    assert not torch.equal(draw(generator(1)), draw(generator(2)))
    print("same seed, same numbers; another seed, others")

    g = generator(1)
    start = draw(g)
    state = g.get_state()
    expected = draw(g)
    g.set_state(state)
    assert torch.equal(draw(g), expected)
    print("resumed from get_state(): the run goes on where it was")
    g.manual_seed(1)
    assert torch.equal(draw(g), start) and not torch.equal(start, expected)
    print("resumed from the seed: the run starts over")

    whole, pieces = draw(generator(1), 32), generator(1)
    pieces = torch.cat([draw(pieces, 8) for _ in range(4)])
    assert not torch.equal(whole, pieces)
    print("randn(32) and four times randn(8), same seed: not the same numbers")

    torch.manual_seed(1)
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        torch.rand(10)
    assert torch.equal(torch.get_rng_state(), before)
    print("fork_rng: what is drawn inside leaves the generator outside as it was")

    ranks, epochs = 4, 5
    same = {draw(generator(7)).sum().item() for _ in range(ranks)}
    assert len(same) == 1
    print(f"{ranks} ranks with one seed: {len(same)} dropout mask")
    pairs = list(itertools.product(range(ranks), range(epochs)))
    added = {draw(generator(7 + rank + epoch)).sum().item() for rank, epoch in pairs}
    assert len(added) == ranks + epochs - 1  # the number of different sums
    print(f"seed + rank + epoch, {epochs} epochs: {len(added)} streams, {len(pairs)} wanted")
    hashed, other = (
        {draw(generator(seed_for(run, *pair))).sum().item() for pair in pairs} for run in (7, 8)
    )
    assert len(hashed | other) == 2 * len(pairs)  # a second run has none of these streams
    print(f"the three hashed together: {len(hashed)} streams")

    n = 1 << 18
    g = generator(3)
    u = torch.rand(n, generator=g, device=device).double().cpu()
    u[0] = 0.0  # rand can return 0, and never 1
    v = torch.rand(n, generator=g, device=device).double().cpu()
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    gumbel = -(-torch.rand(n, 3, generator=g, device=device).double().cpu().log()).log()
    chosen = (weights.log() + gumbel).argmax(-1)
    normal = (-2 * (1 - u).log()).sqrt() * (2 * torch.pi * v).cos()
    tests = {  # the sample, its expected mean, and the standard deviation of one value
        "exponential -ln(1-u), mean 1": (-(1 - u).log(), 1, 1),
        "normal by Box and Muller, mean 0": (normal, 0, 1),
        "  its square, mean 1": (normal**2, 1, 2**0.5),
        "  its fourth power, mean 3": (normal**4, 3, 96**0.5),
        "argmax(ln p + Gumbel) = 0, p 0.5": ((chosen == 0).double(), 0.5, 0.5),
    }
    print(f"from {n:,} uniform numbers (z: distance from the mean in standard errors)")
    for name, (sample, mean, deviation) in tests.items():
        z = (sample.mean().item() - mean) / deviation * n**0.5
        assert abs(z) < 4.5, (name, z)
        print(f"  {name:34} ≈{sample.mean().item():.4f}, |z| < 4.5")


if __name__ == "__main__":
    main()
