"""What one transformer layer keeps for backward, counted and compared with the formula.

Korthikanti et al. (2022, Section 4.1) count the bytes of a layer in 16 bits: 11sbh + 5as²b for
attention, 19sbh for the MLP, and 4sbh for two layer norms. The sum is sbh(34 + 5as/h). The
program builds this layer. With saved_tensors_hooks it gets every tensor that autograd saves,
and it counts each storage once. Then it changes one thing at a time: it uses the dropout of the
CPU, fused attention, and full recomputation.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

S, B, H, A = 256, 2, 256, 8  # sequence, batch, hidden, heads


class Saved:
    """Bytes that autograd keeps for backward, for each part. Each storage counts once."""

    def __init__(self, module: nn.Module) -> None:
        self.seen = {p.untyped_storage().data_ptr() for p in module.parameters()}
        # keeps every storage alive, so that its address is not used again
        self.alive: list[torch.UntypedStorage] = []
        self.parts: Counter[str] = Counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.seen:
                self.seen.add(storage.data_ptr())
                self.alive.append(storage)
                small = storage.nbytes() < S * B * H  # less than half a byte per activation
                self.parts["statistics" if small else name] += storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield


def dropout_with_byte_mask(x: torch.Tensor) -> torch.Tensor:
    """The dropout that `F.dropout` uses on a GPU: its mask has one byte per element."""
    return torch.native_dropout(x, 0.1, True)[0]


def dropout_of_cpu(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.1)


class Layer(nn.Module):
    """The transformer layer of the formula, with pre-norm, GELU and three dropouts."""

    def __init__(self, dropout=dropout_with_byte_mask, fused: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.dropout, self.fused = dropout, fused
        self.bfloat16()

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).view(B, S, 3, A, H // A).permute(2, 0, 3, 1, 4)
        q, k, v = heads  # [b, a, s, h/a] each
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(2, 3) / (H // A) ** 0.5  # [b, a, s, s]
            mixed = self.dropout(scores.softmax(dim=-1)) @ v
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(B, S, H)))

    def forward(self, x: torch.Tensor, saved: Saved) -> torch.Tensor:
        with saved.part("layer norms"):
            normed = self.norm1(x)
        with saved.part("attention"):
            x = x + self.attend(normed)
        with saved.part("layer norms"):
            normed = self.norm2(x)
        with saved.part("MLP"):
            return x + self.dropout(self.down(F.gelu(self.up(normed))))


def measure(layer: Layer) -> Counter[str]:
    saved = Saved(layer)
    layer(torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True), saved)
    return saved.parts


def measure_recomputed(layer: Layer) -> Counter[str]:
    saved = Saved(layer)
    x = torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(x, Saved(layer))  # the tensors saved inside are freed again

    with saved.part("layer input"):
        checkpoint(run, x, use_reentrant=False)
    return saved.parts


def report(title: str, parts: Counter[str], formula: dict[str, float]) -> None:
    print(title)
    unit = S * B * H
    for part, predicted in formula.items():
        print(f"  {part:12} {parts[part] / unit:7.2f}  formula {predicted:5.1f}")
    known = sum(parts[part] for part in formula)
    print(f"  {'together':12} {known / unit:7.2f}  formula {sum(formula.values()):5.1f}")
    if parts["statistics"]:
        print(f"  and means, deviations, log-sums: {parts['statistics'] / unit:.2f}")


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
    torch.manual_seed(0)
    bare = Layer(dropout=lambda x: x).float()
    check_layer(bare, A, torch.randn(B, S, H), Saved(bare))
    ratio = A * S / H
    print(f"s={S} b={B} h={H} a={A}, bf16: bytes in units of sbh, as/h = {ratio:.0f}")
    formula = {"layer norms": 4.0, "attention": 11 + 5 * ratio, "MLP": 19.0}

    parts = measure(Layer())
    report("explicit attention, byte masks: sbh(34 + 5as/h)", parts, formula)
    assert all(parts[part] == predicted * S * B * H for part, predicted in formula.items())

    parts = measure(Layer(dropout=dropout_of_cpu))
    report("the same with the CPU's dropout", parts, formula)

    formula["attention"] = 11.0
    report("fused attention: 34sbh", measure(Layer(fused=True)), formula)

    parts = measure_recomputed(Layer())
    report("recomputed from its input: 2sbh", parts, {"layer input": 2.0})


if __name__ == "__main__":
    main()
