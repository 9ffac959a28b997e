"""A mixture of experts: k of e MLPs per token, with k/e of the FLOPs of the dense sum.

A router gives every token a probability for each expert. The k best experts compute the token,
and their outputs are added with the renormalized probabilities. In the dense version, every
expert computes every token, and most results are multiplied by zero. In the sparse version,
tokens are sorted by expert, and each expert computes only its own tokens. With a capacity, an
expert accepts its first C choices and drops all others. A buffer of C rows is then enough for
each expert, but some tokens lose a part of their output.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

TOKENS, H, EXPERTS, K = 512, 64, 8, 2  # TOKENS = b·s


class MixtureOfExperts(nn.Module):
    def __init__(self, hidden: int, experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
            )
            for _ in range(experts)
        )

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and indices, both [tokens, k], of the experts of each token."""
        probabilities = F.softmax(self.router(x), dim=-1)  # [tokens, e]
        weights, chosen = probabilities.topk(self.k, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """The definition: every expert computes every token."""
        weights, chosen = self.route(x)
        gate = torch.zeros(len(x), len(self.experts), device=x.device)
        gate = gate.scatter(1, chosen, weights)  # zero for experts not chosen
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)  # [tokens, e, h]
        return (gate[:, :, None] * outputs).sum(dim=1)

    def sparse(self, x: torch.Tensor, capacity: int | None = None) -> tuple[torch.Tensor, int]:
        """Each expert computes at most `capacity` tokens. Also returns how many are dropped."""
        weights, chosen = self.route(x)
        expert_of = chosen.flatten()  # [tokens · k], a token's choices side by side
        order = expert_of.argsort(stable=True)  # choices sorted by expert
        counts = expert_of.bincount(minlength=len(self.experts)).tolist()
        out, dropped = torch.zeros_like(x), 0
        for expert, choices in zip(self.experts, order.split(counts), strict=True):
            kept = choices[:capacity]
            dropped += len(choices) - len(kept)
            token = kept // self.k
            weighted = expert(x[token]) * weights.flatten()[kept, None]
            out = out.index_add(0, token, weighted)  # back to the tokens' places
        return out, dropped


def gated(
    moe: MixtureOfExperts, x: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result again, which uses only the layers of the class. Also returns the weights."""
    logits = moe.router(x)
    chosen = logits >= logits.topk(K, dim=-1).values[:, -1:]
    gate = logits.masked_fill(~chosen, -math.inf).softmax(dim=-1)
    gate = gate * (chosen.cumsum(dim=0) <= capacity)  # by their position in the expert's queue
    return sum(gate[:, i, None] * expert(x) for i, expert in enumerate(moe.experts)), gate


def main() -> None:
    torch.manual_seed(0)
    gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if gpu else torch.device("cpu")
    moe = MixtureOfExperts(H, EXPERTS, K).to(device)
    x = torch.randn(TOKENS, H, device=device)

    def run(forward) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        moe.zero_grad()
        with FlopCounterMode(display=False) as counter:
            out = forward(x)
        out.square().sum().backward()
        return (
            out.detach(),
            [p.grad.clone() for p in moe.parameters()],
            counter.get_total_flops(),
        )

    dense, dense_gradients, dense_flops = run(moe.dense)
    sparse, sparse_gradients, sparse_flops = run(lambda x: moe.sparse(x)[0])
    truth, true_gradients, _ = run(lambda x: gated(moe, x, capacity=TOKENS)[0])
    for out, gradients in ((dense, dense_gradients), (sparse, sparse_gradients)):
        torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradients, true_gradients, rtol=1e-4, atol=1e-4)

    router = 2 * TOKENS * H * EXPERTS
    assert dense_flops == router + EXPERTS * 16 * TOKENS * H**2
    assert sparse_flops == router + K * 16 * TOKENS * H**2
    total = sum(p.numel() for p in moe.parameters())
    moe.zero_grad()
    moe.sparse(x[:1])[0].square().sum().backward()
    active = sum(p.numel() for p in moe.parameters() if p.grad.any())  # for one token
    print(f"{EXPERTS} experts, {K} for each token: {total:,} parameters, {active:,} at work")
    print("sparse equals dense in output and in all gradients")
    print(
        f"forward: dense {dense_flops / 1e6:.1f} MFLOP, sparse {sparse_flops / 1e6:.1f} MFLOP"
    )

    print("capacity C = ceil(f · k · tokens / e); choices dropped")
    with torch.no_grad():
        for factor in (0.5, 1.0, 1.1, 1.25):
            capacity = math.ceil(factor * K * TOKENS / EXPERTS)
            out, dropped = moe.sparse(x, capacity)
            truth, gate = gated(moe, x, capacity)
            torch.testing.assert_close(out, truth, rtol=1e-4, atol=1e-6)
            kept = gate.count_nonzero(dim=1)  # choices of each token
            assert dropped == (K - kept).sum()
            same = torch.isclose(out, sparse, rtol=1e-4, atol=1e-6).all(dim=1)
            assert torch.equal(same, kept == K)
            changed = TOKENS - same.sum().item()
            print(
                f"  f = {factor:4}: C = {capacity:3}, {dropped:3} of {K * TOKENS:,} dropped,"
                f" {changed} of {TOKENS} tokens changed"
            )


if __name__ == "__main__":
    main()
