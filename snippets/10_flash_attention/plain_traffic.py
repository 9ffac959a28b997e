"""Plain attention moves about 4s² elements in forward, so memory bandwidth limits its speed.

The program counts the elements that each operator reads and writes, for one head of width d
over s tokens. Forward moves 4s² + 6sd elements for 4s²d FLOPs, and backward moves 7s² + 10sd
elements for 8s²d FLOPs. With g bytes per element, the intensity of forward stays below d/g
FLOPs per byte for every length. Draws plain_traffic.svg.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


# --8<-- [start:counter]
def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention of one head for q, k, v [s, d]. It runs four operators."""
    scores = (q * q.shape[-1] ** -0.5) @ k.T  # [s, s] written
    weights = scores.softmax(-1)  # [s, s] read, [s, s] written
    return weights @ v  # [s, s] read


class Traffic(TorchDispatchMode):
    """Records the elements that each operator reads and writes. A view moves no element."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.ndim]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        sources = {t.untyped_storage().data_ptr() for t in read}
        if any(t.untyped_storage().data_ptr() not in sources for t in made if t.numel()):
            counts = sum(t.numel() for t in read), sum(t.numel() for t in made)
            self.rows.append((func.overloadpacket.__name__, *counts))
        return result


# --8<-- [end:counter]


def count(attention, s: int, d: int) -> tuple[Traffic, Traffic, int, int]:
    """Return the traffic of forward and of backward, and the FLOPs of both."""
    q, k, v = (torch.randn(s, d, requires_grad=True) for _ in range(3))
    gradient = torch.randn(s, d)
    with FlopCounterMode(display=False) as flops, Traffic() as forward:
        out = attention(q, k, v)
    done = flops.get_total_flops()
    with FlopCounterMode(display=False) as flops, Traffic() as backward:
        torch.autograd.grad(out, (q, k, v), gradient)
    return forward, backward, done, flops.get_total_flops()


def library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])[0, 0]


def draw(ridges: dict[str, float], d: int) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "traffic", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.7))
    lengths = [2**i for i in range(7, 18)]
    axes.plot(lengths, [4 * s * s * d / 2 / (4 * s * s + 6 * s * d) for s in lengths],
              color="#c2410c", linewidth=2.2)  # fmt: skip
    axes.plot(lengths, [4 * s * s * d / 2 / (4 * s * d) for s in lengths],
              color="#0b6e99", linewidth=2.2)  # fmt: skip
    for name, ridge in ridges.items():
        axes.axhline(ridge, color="#52525b", linewidth=1, linestyle="--")
        axes.text(1.9e5, ridge, f" {name}: {ridge:.0f}", va="center", color="#52525b")
    axes.text(3e4, 30, f"plain: at most d/2 = {d // 2}", color="#c2410c", ha="center")
    axes.text(6e3, 6e3, "each tensor moved once: s/2", color="#0b6e99", ha="right")
    axes.set(xscale="log", yscale="log", xlabel="sequence length s", xlim=(100, 1.9e5))
    axes.set(ylabel="FLOPs per byte, bf16", ylim=(12, 1.2e5))
    axes.set_xticks([2**i for i in range(7, 18, 2)], ["128", "512", "2k", "8k", "32k", "128k"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("plain_traffic.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    s, d = 512, 64
    q, k, v = (torch.randn(s, d) for _ in range(3))
    torch.testing.assert_close(plain(q, k, v), library(q, k, v), rtol=1e-4, atol=1e-5)
    forward, backward, forward_flops, backward_flops = count(plain, s, d)
    print(f"plain attention, s = {s}, d = {d}; elements in units of s² = {s * s:,}")
    for name, traffic in (("forward", forward), ("backward", backward)):
        for operator, read, written in traffic.rows:
            print(
                f"  {name:8} {operator:22} {read / s**2:5.3f} read {written / s**2:.3f} written"
            )
    moved = [sum(r + w for _, r, w in traffic.rows) for traffic in (forward, backward)]
    predicted = [4 * s * s + 6 * s * d, 7 * s * s + 10 * s * d]
    for name, counted, formula in zip(("forward", "backward"), moved, predicted, strict=True):
        print(f"{name}: {counted:,} elements counted, {formula:,} by the formula")
    assert moved == predicted
    assert forward_flops == 4 * s * s * d and backward_flops == 8 * s * s * d
    print(f"FLOPs: {forward_flops:,} = 4s²d and {backward_flops:,} = 8s²d")

    once = sum(r + w for _, r, w in count(library, s, d)[0].rows)
    print(f"scaled_dot_product_attention, one operator: {once:,} = 4sd + s, forward")
    assert once == 4 * s * d + s

    peaks = {"A100": (312, 2039), "H100": (989, 3350)}  # TFLOP/s, GB/s
    ridges = {name: 1e3 * peak / rate for name, (peak, rate) in peaks.items()}
    print("bf16, d = 128, s = 8192, 32 heads: FLOPs per byte, and times on an H100")
    s, d, a, g = 8192, 128, 32, 2
    flops = 4 * a * s * s * d
    for name, elements in (("plain", 4 * s * s + 6 * s * d), ("moved once", 4 * s * d)):
        bytes_ = g * a * elements
        compute, memory = flops / 989e12, bytes_ / 3350e9
        print(
            f"  {name:10} {flops / bytes_:6.0f} against a ridge of {ridges['H100']:.0f}: "
            f"compute {1e3 * compute:.2f} ms, memory {1e3 * memory:.2f} ms"
        )
    for length in (2**i for i in range(7, 18)):  # the lengths of the figure
        intensity = 4 * length**2 * d / (g * (4 * length**2 + 6 * length * d))
        assert intensity < d / g < min(ridges.values())
    draw(ridges, 128)


if __name__ == "__main__":
    main()
