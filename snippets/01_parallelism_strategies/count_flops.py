"""The FLOPs of a training step are counted for every operator, and compared with 6ΨT.

In the forward pass, each weight needs one multiplication and one addition per token, which are
2 FLOPs. The backward pass needs 4 FLOPs, because it computes the gradients of the input and of
the weight. For T tokens the sum is 6ΨT. The FLOPs of attention, which has no weights, are
added to it. FlopCounterMode counts every operator. On the meta device, tensors have a shape but
no memory, so a laptop can count GPT-3. With recomputation, the count equals equation (3) in
Narayanan et al. (2021): 96Bslh²(1 + s/6h + V/16lh).
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode


class Layer(nn.Module):
    def __init__(self, h: int, a: int) -> None:
        super().__init__()
        self.a = a
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.a, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) / (h // self.a) ** 0.5  # [b, a, s, s]
        mixed = scores.softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with tied embeddings, without a causal mask, which would change no count."""

    def __init__(self, layers: int, h: int, a: int, s: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, h), nn.Embedding(s, h)
        self.layers = nn.ModuleList(Layer(h, a) for _ in range(layers))
        self.norm = nn.LayerNorm(h)
        self.recompute = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]  # [b, s, h]
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)  # [b, s, V]


def count(model: nn.Module, ids: torch.Tensor) -> tuple[int, int]:
    """The FLOPs of the forward pass and of the backward pass."""
    with FlopCounterMode(display=False) as forward:
        loss = model(ids).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    model.zero_grad()
    return forward.get_total_flops(), backward.get_total_flops()


def equation_3(b: int, s: int, layers: int, h: int, vocabulary: int) -> float:
    return 96 * b * s * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))


def check_layer(layer: nn.Module, a: int, x: torch.Tensor, *more: object) -> None:
    """Compare with torch's layer on x [b, s, h]. The weights of its norms come last."""
    h = x.shape[-1]
    library = nn.TransformerEncoderLayer(
        h, a, 4 * h, 0, "gelu", batch_first=True, norm_first=True
    )
    weights = list(layer.parameters())
    for theirs, ours in zip(library.parameters(), weights[4:] + weights[:4], strict=True):
        theirs.data.copy_(ours)
    torch.testing.assert_close(layer(x, *more), library(x))


def main() -> None:
    check_layer(Layer(64, 4), 4, torch.randn(2, 16, 64))
    # name, device, layers, hidden, heads, vocabulary, batch, sequence
    cases = [
        ("small, this machine", "cpu", 4, 256, 8, 2048, 2, 128),
        ("GPT-3, s = 2048", "meta", 96, 12288, 96, 51200, 1, 2048),
        ("8 layers of it, s = 32768", "meta", 8, 12288, 96, 51200, 1, 32768),
    ]
    for name, device, layers, h, a, vocabulary, b, s in cases:
        with torch.device(device):
            model = GPT(layers, h, a, s, vocabulary)
            ids = torch.zeros(b, s, dtype=torch.int64)
        psi = sum(p.numel() for p in model.parameters())
        forward, backward = count(model, ids)
        total, simple = forward + backward, 6 * psi * b * s
        attention = 12 * layers * b * s**2 * h  # QKᵀ and PV: 4s²h forward, 8s²h backward

        print(f"{name}: Ψ = {psi:,}, T = {b * s:,}")
        print(
            f"  forward {forward:.4g}, backward {backward:.4g} = {backward / forward:.2f} × it"
        )
        print(f"  6ΨT = {simple:.4g} is {100 * simple / total:.1f}% of what was counted")
        print(f"  attention 12Lbs²h = {attention:.4g}: {100 * attention / total:.1f}%")
        matrices = 12 * layers * h**2 + vocabulary * h  # without biases and norms
        assert total == 6 * matrices * b * s + attention
        model.recompute = True
        with set_checkpoint_early_stop(False):
            recomputed = sum(count(model, ids))
        expected = equation_3(b, s, layers, h, vocabulary)
        print(f"  recomputed {recomputed:.6g}, equation (3) {expected:.6g}")
        assert round(expected / recomputed, 9) == 1
        if device == "cpu":
            saved = 100 * (1 - sum(count(model, ids)) / recomputed)
            print(f"  PyTorch's checkpoint stops early by default: {saved:.1f}% fewer")


if __name__ == "__main__":
    main()
