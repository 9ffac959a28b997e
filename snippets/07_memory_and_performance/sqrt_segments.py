"""How many checkpoints need the least memory? The square root of r times the number of layers.

L layers form k segments. The k inputs of the segments are kept, and while a segment runs again,
so are the activations of its L/k layers. If the activations of a layer are r times as large as
its input, the peak is k + r·L/k inputs. Its minimum is 2√(rL), at k = √(rL). The program counts
the bytes of live storages for nine values of k and draws sqrt_segments.svg.
"""

import math
import weakref
from itertools import pairwise

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

LAYERS, TOKENS, H = 64, 64, 16


class TwoTanh(nn.Module):
    """Two tanh in a row. Each saves its output, so the activations are r = 2 inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, h]
        return x.tanh().tanh()


class Live(TorchDispatchMode):
    """Counts the bytes of live storages that operators made, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.forget, key).atexit = False
        self.peak = max(self.peak, self.now)
        return result

    def forget(self, key: int) -> None:
        size = self.sizes.pop(key)  # first: other threads may free storages too
        self.now -= size


def peak(segments: int) -> tuple[float, int]:
    """The peak in layer inputs, and the number of layer calls. 0 segments: no checkpoints."""
    layers = nn.Sequential(*(TwoTanh() for _ in range(LAYERS)))
    calls = []
    for layer in layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    with Live() as live:
        x = torch.randn(TOKENS, H, requires_grad=True)
        start = live.now
        if segments:
            bounds = [round(i * LAYERS / segments) for i in range(segments + 1)]
            with set_checkpoint_early_stop(False):
                y = x
                for left, right in pairwise(bounds):
                    y = checkpoint(layers[left:right], y, use_reentrant=False)
                y.backward(torch.ones_like(y))
        else:
            y = layers(x)
            y.backward(torch.ones_like(y))
    return (live.peak - start) / x.nbytes, len(calls)


def draw(counts: dict[int, float], r: int, extra: float, everything: float) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "sqrt", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    ks = range(1, LAYERS + 1)
    axes.plot(ks, [k + r * LAYERS / k + extra for k in ks], color="#0b6e99", linewidth=2)
    axes.plot(ks, ks, color="#52525b", linewidth=1, linestyle="--")
    axes.plot(ks, [r * LAYERS / k for k in ks], color="#52525b", linewidth=1, linestyle="--")
    axes.plot(counts.keys(), counts.values(), "o", color="#c2410c")
    axes.axhline(everything, color="#15803d", linewidth=1.2)
    axes.text(30, everything * 1.06, "no checkpoints", color="#15803d", ha="right")
    axes.text(11, 62, "counted (dots), predicted (line)", color="#0b6e99", ha="center")
    axes.text(4.4, 2.6, "kept inputs: k", color="#52525b")
    axes.text(22, 7, "one segment: rL/k", color="#52525b")
    axes.set(xscale="log", yscale="log", xlabel="segments k", ylabel="peak, in layer inputs")
    ticks = [1, 2, 4, 8, 16, 32, 64]
    axes.set_xticks(ticks, ticks)
    axes.set_yticks([2, 8, 32, 128], [2, 8, 32, 128])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("sqrt_segments.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    r = 2
    everything, forwards = peak(0)
    counts = {k: peak(k)[0] for k in (1, 2, 4, 8, 11, 16, 22, 32, 64)}
    extra = counts[8] - 8 - r * LAYERS / 8
    print(f"L = {LAYERS} layers that keep r = {r} inputs each; peak in inputs")
    print(f"no checkpoints: {everything:.0f}, {forwards} layer forwards")
    print("  k   k + rL/k   counted")
    for k, counted in counts.items():
        predicted = k + r * LAYERS / k
        assert 2 <= counted - predicted < 3, (k, predicted, counted)
        print(f"{k:3}{predicted:11.1f}     {counted:.0f}")
    best = min(counts, key=counts.get)
    print(f"least at k = {best}; √(rL) = {math.sqrt(r * LAYERS):.1f}")
    assert best == min(counts, key=lambda k: abs(k - math.sqrt(r * LAYERS)))
    print(f"layer forwards with k = {best}: {peak(best)[1]}")
    assert forwards == LAYERS and {peak(k)[1] for k in (1, best, 64)} == {2 * LAYERS}
    draw(counts, r, extra, everything)


if __name__ == "__main__":
    main()
