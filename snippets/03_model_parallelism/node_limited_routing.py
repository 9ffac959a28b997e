"""Routing as DeepSeek-V3 does it: few nodes for a token, and a bias that evens the experts out.

256 experts on 8 nodes of 8 GPUs, 8 for each token. Free choice sends a token to 5.3 nodes on
average; limited, to 4 at most, those whose two best scores sum to most. Of each kind of choice:
copies of a token over the network and over NVLink, if every choice travels alone, or one copy
for each GPU, or one for each node that the node hands on (DeepEP). Then popular experts: a bias
on their scores, for the choice alone, is moved by a fixed step against their load.
"""

import math

import torch

TOKENS, H, EXPERTS, NODES, GPUS, K, LIMIT = 2048, 64, 256, 8, 8, 8, 4
WIDTH = 7168  # of DeepSeek-V3, for the bytes
DISPATCH, COMBINE = WIDTH * (1 + 4 / 128), WIDTH * 2  # fp8 with a scale for 128; bf16


def choose(scores: torch.Tensor, bias: torch.Tensor, limit: int = NODES) -> torch.Tensor:
    """The k experts of each token, [tokens, k], on at most `limit` nodes."""
    biased = scores + bias
    by_node = biased.unflatten(-1, (NODES, -1))  # [tokens, nodes, e/nodes]
    best = by_node.topk(K // limit, dim=-1).values.sum(-1)  # [tokens, nodes]
    kept = torch.zeros_like(best).scatter(1, best.topk(limit, dim=-1).indices, 1.0).bool()
    return by_node.masked_fill(~kept[..., None], -math.inf).flatten(1).topk(K, dim=-1).indices


def distinct(places: torch.Tensor, count: int) -> torch.Tensor:
    """Which of `count` places each token goes to, [tokens, count]."""
    return torch.zeros(len(places), count).scatter(1, places, 1.0).bool()


def copies(chosen: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Copies of a token over network and NVLink; its home is GPU 0 of node 0 for all tokens."""
    gpu_of = chosen // (EXPERTS // NODES // GPUS)
    gpus = distinct(gpu_of, NODES * GPUS).unflatten(1, (NODES, GPUS))  # [tokens, nodes, gpus]
    nodes = gpus.any(-1)
    inside = gpus.clone()
    inside[:, :, 0] = False  # arrives at GPU 0 of each node: that copy is there
    n = len(chosen)
    return {
        "a copy for each choice": (
            (gpu_of >= GPUS).sum().item() / n,
            ((gpu_of > 0) & (gpu_of < GPUS)).sum().item() / n,
        ),
        "one for each GPU": (
            gpus[:, 1:].sum().item() / n,
            gpus[:, 0, 1:].sum().item() / n,
        ),
        "one for each node": (
            nodes[:, 1:].sum().item() / n,
            inside.sum().item() / n,
        ),
    }


def met(places: int) -> float:
    """How many of `places` equal ones k even choices meet, on average."""
    missed = math.comb(EXPERTS - EXPERTS // places, K) / math.comb(EXPERTS, K)
    return places * (1 - missed)


def formula() -> dict[str, tuple[float, float]]:
    """`copies` of a free and even choice."""
    n, g = NODES, GPUS
    return {
        "a copy for each choice": (K * (n - 1) / n, K * (g - 1) / (n * g)),
        "one for each GPU": (met(n * g) * (n - 1) / n, met(n * g) * (g - 1) / (n * g)),
        "one for each node": (met(n) * (n - 1) / n, met(n * g) * (g - 1) / g),
    }


def balance(scores: torch.Tensor, steps: int, speed: float = 1e-3) -> list[float]:
    """Load of the busiest expert over the mean, at every step, as the bias moves."""
    bias, busiest = torch.zeros(EXPERTS), []
    for _ in range(steps):
        load = choose(scores, bias, LIMIT).flatten().bincount(minlength=EXPERTS).float()
        busiest.append((load.max() / load.mean()).item())
        bias += speed * (load.mean() - load).sign()
    return busiest


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    logits = torch.randn(TOKENS, H) @ torch.randn(H, EXPERTS) / H**0.5
    print(
        f"{EXPERTS} experts, {K} a token, on {NODES} nodes of {GPUS} GPUs: copies of a token,"
    )
    print(
        f"and µs of their way out in 8 bits and home in 16 (h = {WIDTH:,}), at 50 and 450 GB/s"
    )
    for title, limit in (("free choice", NODES), (f"{LIMIT} nodes at most", LIMIT)):
        chosen = choose(logits.sigmoid(), torch.zeros(EXPERTS), limit)
        nodes = distinct(chosen // (EXPERTS // NODES), NODES).sum(1)
        assert nodes.max() <= limit and (chosen.sort().values.diff() > 0).all()
        heading = f"{title}: {nodes.float().mean():.2f} nodes a token"
        print(f"{heading:36} network  NVLink   by formula       µs")
        for name, counted in copies(chosen).items():
            predicted = formula()[name] if limit == NODES else ()
            if limit < NODES and name == "one for each node":
                predicted = (LIMIT * (NODES - 1) / NODES,)
            for ours, theirs in zip(counted, predicted, strict=False):
                assert abs(ours / theirs - 1) < 0.1, (name, ours, theirs)
            times = [
                1e6 * copy * (DISPATCH + COMBINE) / rate
                for copy, rate in zip(counted, (50e9, 450e9), strict=True)
            ]
            even = "  ".join(f"{number:.2f}" for number in predicted)
            print(
                f"  {name:34} {counted[0]:7.2f} {counted[1]:7.2f}   {even:10} {max(times):8.2f}"
            )

    liked = logits + torch.linspace(0.4, -0.4, EXPERTS)  # some experts suit every token better
    print(
        "popular experts, bias moved by 0.001 a step; the busiest has so many times the mean:"
    )
    busiest = balance(liked.sigmoid(), steps=161)
    shown = (0, 40, 80, 120, 160)
    print("  " + ", ".join(f"step {step}: {busiest[step]:.2f}" for step in shown))
    assert busiest[0] > 2 and max(busiest[-20:]) < 1.3


if __name__ == "__main__":
    main()
