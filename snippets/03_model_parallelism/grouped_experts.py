"""All experts of a rank in one product: grouped_mm over rows that are sorted by expert.

A Python loop starts three products for each expert, even if the expert has few rows.
`grouped_mm` needs all rows, sorted by expert, and the offsets where the rows of each expert
end. It needs three products and no padding, and the numbers of rows may be uneven. A shared
expert computes every token, as in DeepSeek-V3. The output and all gradients are compared with a
loop over experts and tokens. In production the rows are in bf16, and the counts stay on the
GPU, because the host would wait for them, as in `bincount`.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

TOKENS, H, WIDTH, EXPERTS, K = 200, 32, 48, 8, 2  # WIDTH = h_e; three matrices an expert


class Experts(nn.Module):
    """Gated experts, (silu(x W1) * (x W3)) W2, with their weights stacked: [e, in, out]."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, H, WIDTH) * H**-0.5)
        self.w3 = nn.Parameter(torch.randn(experts, H, WIDTH) * H**-0.5)
        self.w2 = nn.Parameter(torch.randn(experts, WIDTH, H) * WIDTH**-0.5)

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """`rows` [sum of counts, h] are sorted by expert. `counts` has one entry per expert."""
        ends = counts.cumsum(0, dtype=torch.int32)
        gate = F.silu(F.grouped_mm(rows, self.w1, offs=ends))
        return F.grouped_mm(gate * F.grouped_mm(rows, self.w3, offs=ends), self.w2, offs=ends)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, EXPERTS, bias=False)
        self.experts, self.shared = Experts(EXPERTS), Experts(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(dim=-1).topk(K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        expert_of = chosen.flatten()  # [tokens · k]
        order = expert_of.argsort(stable=True)
        out = self.experts(x[order // K], F.one_hot(expert_of, EXPERTS).sum(0))
        routed = torch.zeros_like(x).index_add(
            0, order // K, out * weights.flatten()[order, None]
        )
        return routed + self.shared(x, expert_of.new_full((1,), len(x)))


def loop(moe: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """The definition: every expert computes every token, with weight zero if not chosen."""
    logits = moe.router(x)
    others = logits < logits.topk(K, dim=-1).values[:, -1:]
    # over the chosen experts only
    gate = logits.masked_fill(others, -torch.inf).softmax(dim=-1)
    out = torch.zeros_like(x)
    for experts, gates in ((moe.experts, gate), (moe.shared, torch.ones_like(gate[:, :1]))):
        for i in range(len(experts.w1)):
            inner = F.silu(x @ experts.w1[i]) * (x @ experts.w3[i])
            out = out + gates[:, i, None] * (inner @ experts.w2[i])
    return out


class Products(TorchDispatchMode):
    """Counts the matrix products that reach the device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "_grouped_mm"):
            self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    torch.manual_seed(0)
    gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if gpu else torch.device("cpu")
    moe = MixtureOfExperts().to(device)
    results = []
    for forward in (moe, lambda x: loop(moe, x)):
        moe.zero_grad()
        x = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(1)).to(device)
        x.requires_grad_()
        with Products() as products, FlopCounterMode(display=False) as flops:
            out = forward(x)
        out.square().mean().backward()
        gradients = [p.grad.clone() for p in (x, *moe.parameters())]
        results.append((out.detach(), gradients, products.count, flops.get_total_flops()))
    (ours, our_gradients, grouped, seen), (truth, gradients, looped, all_flops) = results
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_gradients, gradients, rtol=1e-4, atol=1e-6)

    counts = moe.router(x).topk(K, dim=-1).indices.flatten().bincount(minlength=EXPERTS)
    print(f"rows of each expert: {counts.tolist()}")
    print("output and all gradients equal those of a loop over experts")
    print(f"products in forward: loop {looped}, grouped {grouped}")
    largest = counts.max().item()
    print(f"rows computed: {counts.sum().item()}, none dropped and none of padding;")
    print(f"  buffers that drop none would have {EXPERTS} · {largest} = {EXPERTS * largest}")
    needed = 2 * TOKENS * H * EXPERTS + (K + 1) * TOKENS * 6 * H * WIDTH
    assert all_flops == 2 * TOKENS * H * EXPERTS + (EXPERTS + 1) * TOKENS * 6 * H * WIDTH
    assert grouped == {"mm": 1, "_grouped_mm": 6} and counts.sum() == K * TOKENS
    print(f"FLOPs: {needed / 1e6:.2f} M by hand; FlopCounterMode sees {seen / 1e6:.2f} M")

    moe.bfloat16()
    with torch.no_grad():
        error = (moe(x.bfloat16()) - truth).norm() / truth.norm()
    assert error < 2e-2
    print(f"in bf16: ≈{error.item():.0e} from fp32")


if __name__ == "__main__":
    main()
