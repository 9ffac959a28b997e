"""Tiles save memory in training only with a backward function that computes p again.

The program measures the peak memory of forward and backward for three versions of attention:
plain, tiles under ordinary autograd, and tiles with their own backward. The first two grow with
s², and the third grows with s. A formula predicts each peak. Draws memory_peak.svg.
"""

import weakref

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

D, TILE = 32, 128


class Live(TorchDispatchMode):
    """Bytes of the storages behind what operators return, and their peak.

    An input counts from the first view of it on.
    """

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
        size = self.sizes.pop(key)  # before now is read: buffers may be freed by other threads
        self.now -= size


def plain(q, k, v):
    return ((q * D**-0.5) @ k.T).softmax(-1) @ v


# --8<-- [start:kept]
def wide(*tensors):
    """Convert 16-bit tensors to fp32. Tensors with wider types keep their type."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def tiled(q, k, v):
    """The forward of flash attention, written with differentiable operators."""
    (q, k, v), out, lse = wide(q, k, v), [], []
    for rows in q.split(TILE):
        m = rows.new_full((len(rows),), -torch.inf)
        total, o = torch.zeros_like(m), 0
        for columns, values in zip(k.split(TILE), v.split(TILE), strict=True):
            z = (rows * q.shape[1] ** -0.5) @ columns.T
            new = torch.maximum(m, z.detach().max(-1).values)
            p, shrink = (z - new[:, None]).exp(), (m - new).exp()
            total = total * shrink + p.sum(-1)
            o = o * shrink[:, None] + p @ values  # autograd saves p for this product
            m = new
        out.append(o / total[:, None])
        lse.append(m + total.log())
    return torch.cat(out), torch.cat(lse)


class Flash(torch.autograd.Function):
    """The forward of `tiled` for q, k, v [s, d]. Its backward computes every p again."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = tiled(q, k, v)  # autograd records nothing inside forward()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, out, lse, do = wide(*ctx.saved_tensors, do)
        scale, delta = q.shape[1] ** -0.5, (do * out).sum(-1)
        dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
        for i in range(0, len(q), TILE):
            r = slice(i, i + TILE)
            for j in range(0, len(k), TILE):
                c = slice(j, j + TILE)
                p = ((q[r] * scale) @ k[c].T - lse[r, None]).exp()
                dv[c] += p.T @ do[r]
                dz = p * (do[r] @ v[c].T - delta[r, None]) * scale
                dq[r] += dz @ k[c]
                dk[c] += dz.T @ q[r]
        return dq, dk, dv


# --8<-- [end:kept]


# --8<-- [start:predicted]
def predicted(s: int) -> dict[str, int]:
    """Return the bytes in fp32 at the peak, which is in backward, for s tokens."""
    return {
        # P, dP and dz; scaled q, k, v, the output, dV
        "plain": 4 * (3 * s * s + 5 * s * D),
        # every p, and one copy of the scaled queries per p; terms that grow with s are omitted
        "tiles, autograd": 4 * s * s * (TILE + D) // TILE,
        # q, k, v, output; four gradients; two numbers per query; four tiles
        "own backward": 4 * (8 * s * D + 2 * s + 4 * TILE * TILE),
    }


# --8<-- [end:predicted]


def peak(attention, s: int) -> tuple[int, list[torch.Tensor]]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(s, D, requires_grad=True) for _ in range(3))
    gradient = torch.randn(s, D)
    with Live() as live:
        gradients = torch.autograd.grad(attention(q, k, v), (q, k, v), gradient)
    return live.peak, gradients


def draw(lengths: list[int], peaks: dict[str, list[int]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "peak", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    colours = ("#c2410c", "#7c3aed", "#0b6e99")
    for (name, values), colour in zip(peaks.items(), colours, strict=True):
        kib = [value / 2**10 for value in values]
        axes.plot(lengths, kib, "o-", color=colour, linewidth=2)
        axes.text(lengths[-1] * 1.06, kib[-1], name, color=colour, va="center")
    for slope, start, name in ((2, 1600, "slope 2: ×4 a doubling"), (1, 210, "slope 1: ×2")):
        guide = [start * (s / lengths[0]) ** slope for s in lengths]
        axes.plot(lengths, guide, color="#6b7280", linewidth=1.2, linestyle="--")
        axes.text(780 if slope == 2 else 1150, 22000 if slope == 2 else 560, name,
                  color="#6b7280", ha="right" if slope == 2 else "left")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="sequence length s", ylabel="peak, KiB")
    axes.set_xticks(lengths, lengths)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("memory_peak.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    ways = {
        "plain": plain,
        "tiles, autograd": lambda q, k, v: tiled(q, k, v)[0],
        "own backward": Flash.apply,
    }
    lengths = [256, 512, 1024, 2048]
    peaks: dict[str, list[int]] = {name: [] for name in ways}
    for s in lengths:
        reference = None
        for name, way in ways.items():
            bytes_, gradients = peak(way, s)
            peaks[name].append(bytes_)
            reference = reference or gradients
            for ours, expected in zip(gradients, reference, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5)
    print(f"peak KiB of forward and backward, one head of width {D}, fp32; gradients equal")
    print("      s" + "".join(f"{name:>17}" for name in ways))

    def kib(bytes_: int) -> str:
        return f"{bytes_ / 2**10:,.0f}"

    for i, s in enumerate(lengths):
        print(f"{s:7}" + "".join(f"{'≈' + kib(values[i]):>17}" for values in peaks.values()))
    theory = predicted(lengths[-1])
    print("formula" + "".join(f"{kib(theory[name]):>17}" for name in ways))
    growth = {name: values[-1] / values[-2] for name, values in peaks.items()}
    print("last x2" + "".join(f"{f'≈{x:.2f}':>17}" for x in growth.values()))
    assert growth["plain"] > 3.7 and growth["tiles, autograd"] > 3.5
    assert growth["own backward"] < 2.05
    for name, allowed in (("plain", 0.01), ("tiles, autograd", 0.12), ("own backward", 0.01)):
        assert abs(peaks[name][-1] / theory[name] - 1) < allowed, name
    s = lengths[-1]
    matrices = peaks["plain"][-1] / (4 * s * s)
    print(f"plain: ≈{matrices:.1f} matrices of s² at the peak")
    assert 3 <= matrices < 3.3
    draw(lengths, peaks)


if __name__ == "__main__":
    main()
