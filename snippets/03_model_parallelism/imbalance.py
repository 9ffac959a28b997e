"""The busiest expert determines the time of a step, and an auxiliary loss balances the experts.

Tokens come from clusters of unequal size, as words do. A top-1 router is trained with and
without the loss of Switch Transformers (Fedus et al., 2021), w · e · Σ f_i P_i. Here f_i is the
fraction of tokens that expert i gets, and P_i is the mean probability that the router gives it.
Rank 0 trains. Then all ranks run an expert-parallel step with the counts of the last batch. A
sleep that is proportional to the tokens of a rank's experts takes the place of computing, and
the all-to-all after it waits for the slowest rank. Draws imbalance.svg.
"""

import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

TOKENS, H, EXPERTS, CLUSTERS, STEPS = 1024, 16, 8, 32, 120
SECONDS_PER_TOKEN = 100e-6  # of the emulated expert


def train(weight: float) -> tuple[list[float], torch.Tensor, float]:
    """Fraction of the busiest expert in each step, last counts, and mean loss of 20 steps."""
    torch.manual_seed(0)
    centres = 2 * torch.randn(CLUSTERS, H)
    maps = torch.randn(CLUSTERS, H, H) / H**0.5  # the targets: one map for each cluster
    sizes = 1 / torch.arange(1, CLUSTERS + 1).float()  # Zipf: the i-th in proportion to 1/i
    router = (torch.randn(H, EXPERTS) / H**0.5).requires_grad_()
    experts = (torch.randn(EXPERTS, H, H) / H**0.5).requires_grad_()
    optimizer = torch.optim.Adam([router, experts], lr=0.01)
    shares: list[float] = []
    errors: list[float] = []
    for _ in range(STEPS):
        cluster = sizes.multinomial(TOKENS, replacement=True)
        x = centres[cluster] + 0.3 * torch.randn(TOKENS, H)
        target = torch.einsum("th,thk->tk", x, maps[cluster])

        probabilities = F.softmax(x @ router, dim=-1)
        gate, chosen = probabilities.max(dim=-1)  # top-1
        out = torch.zeros_like(x)
        for i in range(EXPERTS):
            mine = (chosen == i).nonzero().flatten()
            out = out.index_add(0, mine, gate[mine, None] * (x[mine] @ experts[i]))
        error = F.mse_loss(out, target)

        counts = chosen.bincount(minlength=EXPERTS)
        f, p = counts / TOKENS, probabilities.mean(dim=0)  # f has no gradient, p has
        loss = error + weight * EXPERTS * (f * p).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shares.append(f.max().item())
        errors.append(error.item())
    # Σ f P again: the mean probability of a token for the expert of another token
    again = weight * EXPERTS * probabilities[:, chosen].mean()
    torch.testing.assert_close(loss - error, again, rtol=1e-4, atol=1e-5)
    return shares, counts, sum(errors[-20:]) / 20


def dropped(counts: torch.Tensor, factor: float) -> float:
    """Fraction of tokens above the capacity, ceil(factor · tokens / experts)."""
    capacity = math.ceil(factor * TOKENS / EXPERTS)
    return (counts - capacity).clamp(min=0).sum().item() / TOKENS


def step_seconds(counts: torch.Tensor) -> float:
    """One emulated step of an expert-parallel layer on all ranks; the median of three."""
    mine = counts.chunk(dist.get_world_size())[dist.get_rank()].sum().item()
    seconds = mine * SECONDS_PER_TOKEN
    every = torch.tensor(seconds)
    dist.all_reduce(every)
    assert math.isclose(every, TOKENS * SECONDS_PER_TOKEN, rel_tol=1e-5)  # each token once
    times = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        time.sleep(seconds)
        rows = torch.ones(dist.get_world_size(), H)
        dist.all_to_all_single(torch.empty_like(rows), rows)  # waits for the slowest rank
        times.append(time.perf_counter() - begin)
    return sorted(times)[1]


def draw(curves: dict[float, list[float]]) -> None:
    import matplotlib  # only rank 0 draws

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "imbalance", "font.size": 11})
    figure, axis = plt.subplots(figsize=(7, 3.6))
    for (weight, shares), colour in zip(
        curves.items(), ("#c2410c", "#7c3aed", "#0b6e99"), strict=True
    ):
        axis.plot([100 * share for share in shares], color=colour, linewidth=2)
        name = f"w = {weight:g}" if weight else "no auxiliary loss"
        axis.text(STEPS + 2, 100 * sum(shares[-10:]) / 10, name, color=colour, va="center")
    axis.axhline(100 / EXPERTS, color="#52525b", linestyle=":", linewidth=1.2)
    axis.text(0, 100 / EXPERTS - 1, "even", color="#52525b", va="top")
    axis.set(xlim=(0, STEPS * 1.28), ylim=(0, None))
    axis.set_xlabel("step")
    axis.set_ylabel("tokens of the busiest expert, %")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("imbalance.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this program with: torchrun --nproc-per-node=4 imbalance.py")
    if EXPERTS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {EXPERTS} experts")
    dist.init_process_group("gloo")  # reads the host's clock, so it stays on the CPU
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)

    curves: dict[float, list[float]] = {}
    times: list[float] = []
    if rank == 0:
        print(f"{EXPERTS} experts on {n} ranks, {TOKENS} tokens; even would be 12.5%")
        print("weight  busiest expert  dropped at f = 1, 1.25, 2  the step of rank 0")
    for weight in (0.0, 0.3, 1.0):
        counts = torch.empty(EXPERTS, dtype=torch.int64)
        if rank == 0:
            curves[weight], counts, error = train(weight)
        dist.broadcast(counts, src=0)
        slowest = counts.view(n, -1).sum(1).max().item() * SECONDS_PER_TOKEN
        times.append(step_seconds(counts))
        if rank == 0:
            drops = "  ".join(f"≈{dropped(counts, f):.0%}" for f in (1.0, 1.25, 2.0))
            for f in (1.0, 1.25, 2.0):
                fits = sum(
                    min(count, math.ceil(f * TOKENS / EXPERTS)) for count in counts.tolist()
                )
                assert math.isclose(dropped(counts, f), 1 - fits / TOKENS, abs_tol=1e-9)
            own = counts.view(n, -1)[0].sum().item() * SECONDS_PER_TOKEN
            print(
                f"{weight:6}  ≈{counts.max().item() / TOKENS:.0%} of tokens   {drops}"
                f"   computes ≈{own * 1e3:.0f} ms, predicted ≈{slowest * 1e3:.0f} ms,"
                f" measured ≈{times[-1] * 1e3:.0f} ms; error ≈{error:.2f}"
            )
            assert times[-1] > 0.8 * slowest  # no rank finished before the busiest one
    if rank == 0:
        assert max(curves[1.0][-10:]) < min(curves[0.0][-10:])
        print("the busiest expert has less with the auxiliary loss than without")
        draw(curves)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
