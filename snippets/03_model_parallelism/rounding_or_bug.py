"""How different may the loss and the gradients be after a cut, if nothing is wrong?

A correct cut changes only the order of sums. One process runs a small transformer with the sums
of each cut: TP adds one partial product for each rank, DP and the micro-batches of a pipeline
add gradients, and CP adds blocks of the softmax and gradients of pieces of the sequence. Each
is compared with the same model without cuts. Two other differences show what is normal: the
distance of the model from float64, and from itself with renamed units, which also changes the
order of its sums. A rounding error falls with the precision, and the effect of a bug does not.
"""

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

B, S, H, HEADS, VOCAB, LAYERS = 8, 32, 32, 4, 64, 4
Weights = dict[str, Tensor]


class Cut(NamedTuple):
    tp: int = 1
    dp: int = 1  # data-parallel ranks, or the micro-batches of a pipeline
    cp: int = 1
    bug: str = ""


UNCUT = Cut()
CUTS = {
    "TP 4": Cut(tp=4),
    "CP 4": Cut(cp=4),
    "DP 4; PP with 4 micro-batches": Cut(dp=4),
    "TP 2 · CP 2 · DP 2": Cut(tp=2, cp=2, dp=2),
}
BUGS = {
    "TP 4, f adds nothing in backward": Cut(tp=4, bug="f"),
    "DP 4, gradients summed": Cut(dp=4, bug="sum"),
    "DP 4, mean of the ranks' means": Cut(dp=4, bug="means"),
}


def make(seed: int, layers: int = LAYERS) -> Weights:
    torch.manual_seed(seed)
    shapes = {"embed": (VOCAB, H)}
    for i in range(layers):
        shapes |= {f"{i}.qkv": (H, 3 * H), f"{i}.out": (H, H)}
        shapes |= {f"{i}.up": (H, 4 * H), f"{i}.down": (4 * H, H)}
    shapes["head"] = (H, VOCAB)
    scale = {"embed": 1.0, "head": H**-0.5}
    return {
        name: torch.randn(shape, dtype=torch.float64) * scale.get(name, shape[0] ** -0.5)
        for name, shape in shapes.items()
    }


def make_batch(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens [b, s+1], which step by five or twelve in a cycle, and a mask of the s targets."""
    random = torch.Generator().manual_seed(seed)
    first = torch.randint(VOCAB, (B, 1), generator=random)
    jumps = (torch.rand(B, S + 1, generator=random) < 0.2).cumsum(1)
    lengths = torch.randint(S - 4, S + 1, (B, 1), generator=random)  # nearly full: 28 to 32
    return (first + 5 * torch.arange(S + 1) + 7 * jumps) % VOCAB, torch.arange(S) < lengths


def attend(q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[Tensor]:
    """Causal attention over pieces of the sequence, [b, heads, s/c, d] each, block by block."""
    outs = []
    for i, queries in enumerate(q):
        top = total = out = None
        for keys, values in zip(k[: i + 1], v[: i + 1], strict=True):
            scores = (queries @ keys.mT).to(sums(queries)) * queries.shape[-1] ** -0.5
            if keys is k[i]:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            new = scores.amax(-1, keepdim=True)
            new = new if top is None else torch.maximum(top, new)
            weights = (scores - new).exp()
            block, mass = weights @ values.to(weights.dtype), weights.sum(-1, keepdim=True)
            if top is None:
                total, out = mass, block
            else:
                total, out = total * (top - new).exp() + mass, out * (top - new).exp() + block
            top = new
        outs.append((out / total).to(queries.dtype))
    return outs


def sums(x: Tensor) -> torch.dtype:
    """The dtype of sums in softmax, norms and loss: fp32 if the model is in bf16."""
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x.to(sums(x)), (H,)).to(x.dtype)


def add_parts(parts: list[Tensor]) -> Tensor:
    """TP's all-reduce: one partial product per rank, each rounded to the model's dtype."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def loss_sum(w: Weights, tokens: Tensor, counts: Tensor, cut: Cut) -> Tensor:
    """Sum of the losses of the targets that count; `w` has the dtype of the model."""
    pieces = [w["embed"][piece] for piece in tokens[:, :-1].chunk(cut.cp, dim=1)]

    def copies(x: Tensor) -> list[Tensor]:  # f of TP: backward adds the ranks' gradients
        return [x.detach() if cut.bug == "f" and r else x for r in range(cut.tp)]

    for i in range(sum(name.endswith("qkv") for name in w)):
        d = H // HEADS
        qkv = w[f"{i}.qkv"].view(H, 3, HEADS, d).chunk(cut.tp, dim=2)  # [h, 3, a/t, d]
        inputs = [copies(norm(x)) for x in pieces]
        parts: list[list[Tensor]] = [[] for _ in pieces]
        for r, out in enumerate(w[f"{i}.out"].chunk(cut.tp)):
            mine = [
                (x[r] @ qkv[r].reshape(H, -1)).unflatten(-1, (3, -1, d)).permute(2, 0, 3, 1, 4)
                for x in inputs
            ]  # [3, b, a/t, s/c, d] a piece
            mixed = attend(*([piece[j] for piece in mine] for j in range(3)))
            for part, piece in zip(parts, mixed, strict=True):
                part.append(piece.transpose(1, 2).flatten(2) @ out)
        pieces = [x + add_parts(part) for x, part in zip(pieces, parts, strict=True)]
        up, down = w[f"{i}.up"].chunk(cut.tp, dim=1), w[f"{i}.down"].chunk(cut.tp)
        pieces = [
            x + add_parts([F.gelu(y @ up[r]) @ down[r] for r, y in enumerate(copies(norm(x)))])
            for x in pieces
        ]
    total = 0
    for x, target, count in zip(
        pieces, tokens[:, 1:].chunk(cut.cp, 1), counts.chunk(cut.cp, 1), strict=True
    ):
        logits = norm(x) @ w["head"]
        each = F.cross_entropy(logits.to(sums(x)).mT, target, reduction="none")
        # in float64, so that this sum adds no rounding
        total = total + (each.double() * count).sum()
    return total


def run(
    master: Weights, batch: tuple[Tensor, Tensor], dtype: torch.dtype, cut: Cut = UNCUT
) -> tuple[float, Weights]:
    """Loss and gradients, with master weights and gradients in fp32, or float64 if dtype is."""
    keep = torch.float32 if dtype == torch.bfloat16 else dtype
    leaves = {name: w.detach().clone().to(keep).requires_grad_() for name, w in master.items()}
    loss = 0.0
    for tokens, counts in zip(*(part.chunk(cut.dp) for part in batch), strict=True):
        total = loss_sum({n: w.to(dtype) for n, w in leaves.items()}, tokens, counts, cut)
        targets = (
            counts.sum() * cut.dp if cut.bug == "means" else batch[1].sum()
        )  # of all ranks
        mean = total / targets
        (mean * (cut.dp if cut.bug == "sum" else 1)).backward()
        loss += mean.item()
    return loss, {name: w.grad for name, w in leaves.items()}


def renamed(master: Weights, back: bool = False, seed: int = 0) -> Weights:
    """The same model with its channels, heads and hidden units in another order."""
    random = torch.Generator().manual_seed(seed)
    h, inner, heads = (torch.randperm(n, generator=random) for n in (H, 4 * H, HEADS))
    rows = (heads[:, None] * (H // HEADS) + torch.arange(H // HEADS)).flatten()
    if back:
        h, inner, rows = h.argsort(), inner.argsort(), rows.argsort()
    columns = (torch.arange(3)[:, None] * H + rows).flatten()
    orders = {"embed": (None, h), "head": (h, None), "qkv": (h, columns), "out": (rows, h)}
    orders |= {"up": (h, inner), "down": (inner, h)}
    every = slice(None)
    out = {}
    for name, w in master.items():
        first, second = orders[name.split(".")[-1]]
        out[name] = w[every if first is None else first][:, every if second is None else second]
    return out


def apart(a: Weights, b: Weights) -> float:
    """The largest relative difference of any tensor, by its norm."""
    return max(
        ((a[n].double() - b[n].double()).norm() / b[n].double().norm()).item() for n in b
    )


def gap(losses: tuple[float, float], gradients: tuple[Weights, Weights]) -> tuple[float, float]:
    return abs(losses[0] / losses[1] - 1), apart(*gradients)


def rms(values: Iterable[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


def one_step(seed: int, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Relative differences of loss and gradients after the first forward and backward."""
    master, batch = make(seed), make_batch(seed)
    (one, ours), (true, exact) = run(master, batch, dtype), run(master, batch, torch.float64)
    gaps = {"one process, from float64": gap((one, true), (ours, exact))}
    other, theirs = run(renamed(master), batch, dtype)
    gaps["one process, units renamed"] = gap((other, one), (renamed(theirs, back=True), ours))
    for name, cut in (CUTS | BUGS).items():
        loss, gradients = run(master, batch, dtype, cut)
        gaps[name] = gap((loss, one), (gradients, ours))
    return gaps


def say(gap: float) -> str:
    return f"≈{gap:.0e}" if gap > 1e-12 else "equal "


def verdict(bf16: float, fp32: float) -> str:
    """Say whether a difference, measured in bf16 and in fp32, is rounding or a bug."""
    return "rounding" if bf16 / fp32 > 1000 else "a bug"


def train(cut: Cut, first_batch: int = 0, steps: int = 32) -> list[float]:
    """The losses of AdamW, in bf16 over fp32 master weights, with two layers."""
    weights = {name: w.float() for name, w in make(0, layers=2).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss, gradients = run(weights, make_batch(first_batch + step), torch.bfloat16, cut)
        for name, weight in weights.items():
            weight.grad = gradients[name]
        optimizer.step()
        losses.append(loss)
    return losses


def main() -> None:
    torch.set_num_threads(1)
    seeds = range(3)
    bf16, fp32 = (
        [one_step(seed, dtype) for seed in seeds] for dtype in (torch.bfloat16, torch.float32)
    )
    print(f"first step, {LAYERS} layers: relative difference, root mean square of 3 seeds")
    print(f"{'':32}  loss, bf16, fp32    gradients, bf16, fp32  falls by")
    falls = {}
    for name in bf16[0]:
        loss16, loss32 = (rms(gaps[name][0] for gaps in all_) for all_ in (bf16, fp32))
        grad16, grad32 = (rms(gaps[name][1] for gaps in all_) for all_ in (bf16, fp32))
        falls[name] = (grad16, grad32)
        print(
            f"{name:32}  {say(loss16)}  {say(loss32)}   ≈{grad16:.1e}  ≈{grad32:.1e}"
            f"  ≈{grad16 / grad32:.0e}  {verdict(grad16, grad32)}"
        )
        assert verdict(grad16, grad32) == ("a bug" if name in BUGS else "rounding")
        if name in CUTS:  # about as close to one process as that is to float64
            own16, own32 = falls["one process, from float64"]
            assert grad16 < 2 * own16 and grad32 < 2 * own32
            assert 2**16 / 8 < grad16 / grad32 < 2**16 * 8
    tight, loose = falls["one process, units renamed"], falls["one process, from float64"]
    assert falls["TP 4"][0] > 2 * tight[0]  # renaming rounds no partial sum to bf16
    # in bf16 it looks nearly normal
    assert falls["DP 4, mean of the ranks' means"][0] < 5 * loose[0]

    print("gradients against depth, bf16:      layers")
    for name in ("TP 4", "DP 4; PP with 4 micro-batches"):
        grown = []
        for layers in (1, 4, 16):
            master, batch = make(0, layers), make_batch(0)
            both = (run(master, batch, torch.bfloat16, cut)[1] for cut in (CUTS[name], UNCUT))
            grown.append(apart(*both))
        cells = (f"{n}: ≈{gap:.1e}" for n, gap in zip((1, 4, 16), grown, strict=True))
        print(f"  {name:32}" + "   ".join(cells))
        # as a random walk: four times as far with sixteen times the layers
        assert 2 < grown[2] / grown[0] < 8 if name == "TP 4" else grown[2] < 1.5 * grown[0]

    print("loss against steps, AdamW, bf16: root mean square of the relative difference")
    base, curves = train(UNCUT), {}
    runs = {"TP 4": Cut(tp=4)} | BUGS
    for name, cut in (runs | {"one process, other batches": UNCUT}).items():
        losses = train(cut, first_batch=0 if name in runs else 1000)
        early, late = (
            rms(a / b - 1 for a, b in zip(losses[part], base[part], strict=True))
            for part in (slice(8), slice(16, 32))
        )
        curves[name] = late
        print(f"  {name:34}steps 1 to 8: ≈{early:.0e}   17 to 32: ≈{late:.0e}")
    assert curves["TP 4"] < 0.1 * curves["one process, other batches"]
    # a bug that the curve does not show
    assert curves["DP 4, gradients summed"] < 3 * curves["TP 4"]
    assert curves["DP 4, mean of the ranks' means"] < 0.1 * curves["one process, other batches"]
    assert curves["TP 4, f adds nothing in backward"] > 10 * curves["TP 4"]


if __name__ == "__main__":
    main()
