"""Routing as in DeepSeek-V3: few nodes for each token, and a bias that balances the experts.

There are 256 experts on 8 nodes of 8 GPUs, and each token chooses 8. A free choice sends a
token to 5.3 nodes on average. A limited choice sends it to at most 4 nodes, those with the
largest sum of their two best scores. For both, the program counts the copies of a token over
the network and over NVLink: one for each choice, one for each GPU, or one for each node, which
the node forwards (DeepEP).

Then some experts are popular. A bias is added to the scores, only for the choice. After each
step it moves by a constant against the load. Every step has new tokens. Even if all experts
were equally popular, the numbers of tokens would differ by chance, so the program also prints
the load of the busiest expert when every token chooses 8 experts at random.
"""

import math

import torch

TOKENS, H, EXPERTS, NODES, GPUS, K, LIMIT = 2048, 64, 256, 8, 8, 8, 4
STEPS = 160
WIDTH = 7168  # of DeepSeek-V3, for the bytes
DISPATCH, COMBINE = WIDTH * (1 + 4 / 128), WIDTH * 2  # fp8 with a scale for 128; bf16


def choose(scores: torch.Tensor, bias: torch.Tensor, limit: int = NODES) -> torch.Tensor:
    """Return the k experts of each token, [tokens, k], on at most `limit` nodes."""
    biased = scores + bias
    by_node = biased.unflatten(-1, (NODES, -1))  # [tokens, nodes, e/nodes]
    best = by_node.topk(K // limit, dim=-1).values.sum(-1)  # [tokens, nodes]
    kept = torch.zeros_like(best).scatter(1, best.topk(limit, dim=-1).indices, 1.0).bool()
    return by_node.masked_fill(~kept[..., None], -math.inf).flatten(1).topk(K, dim=-1).indices


def distinct(places: torch.Tensor, count: int) -> torch.Tensor:
    """Return to which of `count` places each token goes, [tokens, count], as booleans."""
    return torch.zeros(len(places), count).scatter(1, places, 1.0).bool()


def copies(chosen: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Copies of a token over the network and over NVLink. All tokens are on GPU 0 of node 0."""
    gpu_of = chosen // (EXPERTS // NODES // GPUS)
    gpus = distinct(gpu_of, NODES * GPUS).unflatten(1, (NODES, GPUS))  # [tokens, nodes, gpus]
    nodes = gpus.any(-1)
    inside = gpus.clone()
    inside[:, :, 0] = False  # the copy arrives at GPU 0 of each node
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
    """The mean number of `places` equal places to which k even choices go."""
    missed = math.comb(EXPERTS - EXPERTS // places, K) / math.comb(EXPERTS, K)
    return places * (1 - missed)


def formula() -> dict[str, tuple[float, float]]:
    """The expected result of `copies` if all choices are equally likely."""
    n, g = NODES, GPUS
    return {
        "a copy for each choice": (K * (n - 1) / n, K * (g - 1) / (n * g)),
        "one for each GPU": (met(n * g) * (n - 1) / n, met(n * g) * (g - 1) / (n * g)),
        "one for each node": (met(n) * (n - 1) / n, met(n * g) * (g - 1) / g),
    }


def load_of(chosen: torch.Tensor) -> torch.Tensor:
    """Tokens of each expert, [e], divided by the mean over the experts."""
    return chosen.flatten().bincount(minlength=EXPERTS) * EXPERTS / chosen.numel()


def balance(
    weight: torch.Tensor, steps: int, speed: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Load of each expert in every step, [steps, e], for new tokens and a changing bias.

    Also return the load of each expert, [e], if the tokens of the last step choose their
    experts without the bias.
    """
    popularity = torch.linspace(0.4, -0.4, EXPERTS)  # is added to the logits of every token
    bias, loads = torch.zeros(EXPERTS), []
    for _ in range(steps):
        scores = (torch.randn(TOKENS, H) @ weight / H**0.5 + popularity).sigmoid()
        load = load_of(choose(scores, bias, LIMIT))
        bias += speed * (1 - load).sign()
        loads.append(load)
    return torch.stack(loads), load_of(choose(scores, torch.zeros(EXPERTS), LIMIT))


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

    weight = torch.randn(H, EXPERTS)
    print(
        "popular experts; load of the busiest expert in one step, and in the mean of 40 steps"
    )
    results = {}
    for name, steps, speed in (("no bias", 40, 0.0), ("bias moved by 0.001", STEPS, 1e-3)):
        results[name], without = balance(weight, steps, speed)
        # to the end, the tokens prefer the first experts, whose popularity is positive
        assert without[: EXPERTS // 2].mean() > 1.3
    even = [load_of(torch.rand(TOKENS, EXPERTS).topk(K).indices) for _ in range(40)]
    results["random choice"] = torch.stack(even)
    for name, loads in results.items():
        last = loads[-40:]
        print(f"  {name:20} {last.max(1).values.mean():.2f}   {last.mean(0).max():.2f}")
    kept, moved, chance = (loads[-40:].mean(0).max() for loads in results.values())
    assert kept > 2 and moved < 1.1 and abs(moved - chance) < 0.05
    # in one step, the loads differ as by chance: 64 tokens for each expert, and 1/8 of them
    kept, moved, chance = (loads[-40:].max(1).values.mean() for loads in results.values())
    assert kept > 2 and abs(moved - chance) < 0.1 and chance > 1 + 2 / 8


if __name__ == "__main__":
    main()
