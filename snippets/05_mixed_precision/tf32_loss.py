"""How far tf32 and bf16 inputs move the loss of a training run, compared with another seed.

A dispatch mode rounds the inputs of all matrix products, in forward and backward, to 10 bits of
mantissa, as in tf32, or to 7 bits, as in bf16. Everything else remains in fp32. Two more fp32
runs change one thing each: the initial weights, or the batches. Draws tf32_loss.svg.
"""

import codecs
import contextlib
import io

import matplotlib
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

with contextlib.redirect_stdout(io.StringIO()):
    import this  # prints the Zen of Python, which is the text to learn

matplotlib.use("svg")
import matplotlib.pyplot as plt

B, S, H, HEADS, STEPS = 4, 32, 48, 4, 150
FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2)}  # which arguments are factors


def round_mantissa(x: torch.Tensor, m: int) -> torch.Tensor:
    """Round fp32 to `m` bits of mantissa, ties to even; m = 10 gives tf32."""
    drop = 23 - m
    bits = x.contiguous().view(torch.int32)
    bits = bits + (2 ** (drop - 1) - 1) + ((bits >> drop) & 1)
    return (bits & -(2**drop)).view(torch.float32)


class RoundedInputs(TorchDispatchMode):
    """Round the inputs of each matrix product; the product itself and its sums are fp32."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.m, self.count = m, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args = list(args)
        for place in FACTORS.get(func.overloadpacket.__name__, ()):
            args[place] = round_mantissa(args[place], self.m)
            self.count += place == 1
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(letters, H), nn.Embedding(S, H)
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(2))
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.head = nn.Linear(H, letters)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight  # [b, s, h]
        shape = (*x.shape[:2], 3, HEADS, H // HEADS)
        q, k, v = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (H // HEADS) ** 0.5  # [b, a, s, s]
        later = torch.ones(S, S, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(self.norms[1](x)))))


def train(
    bits: int | None = None, weights: int = 0, batches: int = 0
) -> tuple[list[float], int]:
    """The losses of all steps, and the number of products whose inputs were rounded.

    `weights` is the seed of the initial weights, and `batches` is the seed of the batches.
    """
    text = codecs.decode(this.s, "rot13")
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(c) for c in text])
    torch.manual_seed(weights)
    model = Model(len(letters))
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)
    draws = torch.Generator().manual_seed(batches)
    losses = []
    mode = RoundedInputs(bits) if bits else contextlib.nullcontext()
    for _ in range(STEPS):
        starts = torch.randint(len(ids) - S - 1, (B,), generator=draws)
        batch = torch.stack([ids[i : i + S + 1] for i in starts])
        adam.zero_grad()
        with mode:
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses, mode.count if bits else 0


def draw(gaps: dict[str, list[float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "tf32_loss", "font.size": 12}
    figure, axis = plt.subplots(figsize=(7, 3.8))
    for (name, gap), colour in zip(
        gaps.items(), ("#15803d", "#c2410c", "#7c3aed", "#52525b"), strict=True
    ):
        gap = smooth(gap)
        axis.plot(range(1, STEPS + 1), gap, color=colour, linewidth=1.4)
        axis.text(STEPS * 1.02, gap[-1], name, color=colour, va="center")
    axis.set(
        yscale="log", xlabel="step", ylabel="distance from the loss of fp32", xlim=(1, STEPS)
    )
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("tf32_loss.svg", transparent=True, metadata={"Date": None})


def smooth(gap: list[float]) -> list[float]:
    """The mean of the last ten values at each step."""
    padded = torch.tensor([gap[0]] * 9 + gap)
    return padded.unfold(0, 10, 1).mean(-1).tolist()


def check() -> None:
    """Compare with torch's formats of 7 and 10 bits; a linear layer's bias is not rounded."""
    x, w, b = torch.randn(16, 32), torch.randn(8, 32), torch.randn(8)
    x[0, :3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11])  # ties
    low, half = x.bfloat16().float(), x.half().float()
    assert torch.equal(round_mantissa(x, 7), low)
    assert torch.equal(round_mantissa(x, 10)[x.abs() > 2**-14], half[x.abs() > 2**-14])
    with RoundedInputs(7):
        ours = F.linear(x, w, b)
    torch.testing.assert_close(ours, low @ w.bfloat16().float().t() + b)


def main() -> None:
    torch.set_num_threads(1)  # one order of additions
    check()
    fp32, _ = train()
    runs = {"tf32, 10 bits": train(10), "bf16, 7 bits": train(7)}
    runs |= {"other weights": train(weights=1), "other batches": train(batches=1)}
    print(
        f"fp32: loss {fp32[0]:.2f} in step 1, ≈{sum(fp32[-20:]) / 20:.2f} in the last 20 steps"
    )
    gaps, means = {}, {}
    for name, (losses, count) in runs.items():
        gaps[name] = [abs(ours - theirs) for ours, theirs in zip(losses, fp32, strict=True)]
        means[name] = sum(gaps[name][STEPS // 2 :]) / (STEPS // 2)
        print(f"{name:14} mean distance ≈{means[name]:.1e}", end="")
        print(f"; {count / STEPS:g} rounded products per step")
        assert count == (0 if "other" in name else 21 * STEPS)  # 7 forward, 14 backward
    ten, seven, weights, batches = means.values()
    print(f"three bits fewer: ≈{seven / ten:.1f} times the distance")
    assert 4.5 < seven / ten < 14 and weights > 500 * ten  # 8 for three bits, with noise
    assert batches > 2 * weights  # a distance between different batches is mostly their noise
    draw(gaps)


if __name__ == "__main__":
    main()
