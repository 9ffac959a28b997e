"""Five ways to train one small transformer differ in time, bytes and loss.

The model, the data and the seeds are the same, and only the precisions differ. The bf16 model
is trained with two further seeds. The text is the Zen of Python. Draws precisions.svg.

Look at the gaps to the loss of fp32. The last table compares two evaluations of the trained
fp32 model: under autocast, as a trainer does, and with weights cast to 16 bits, as a sampler
does. It shows by how much the two differ in the logarithm of a probability.
"""

import codecs
import contextlib
import copy
import io
import statistics
import time

import matplotlib
import torch
import torch.nn.functional as F
from torch import nn

with contextlib.redirect_stdout(io.StringIO()):
    import this  # prints the Zen of Python, which is the text to learn

matplotlib.use("svg")
import matplotlib.pyplot as plt

LOW, HALF = torch.bfloat16, torch.float16
B, S, H, HEADS, STEPS, RATE = 4, 32, 48, 4, 160, 2e-3
WAYS = {  # name: type of the model, type of autocast, scaler, stochastic rounding
    "fp32": (torch.float32, None, False, False),
    "bf16 autocast": (torch.float32, LOW, False, False),
    "fp16 + scaler": (torch.float32, HALF, True, False),
    "bf16 model": (LOW, None, False, False),
    "bf16 stochastic": (LOW, None, False, True),
}
AGAIN = ("bf16 model", "bf16 stochastic")  # with other seeds
COLOURS = ("#52525b", "#0b6e99", "#7c3aed", "#c2410c", "#15803d")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(2))
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], 3, HEADS, H // HEADS)
        q, k, v = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norms[1](x))))  # [b, s, h]


class Model(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(letters, H), nn.Embedding(S, H)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(H, letters)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(S, device=ids.device))
        return self.head(self.blocks(x))  # [b, s, letters]


def round_stochastically(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16. The probability of rounding up is the fraction that is cut off."""
    bits = x.view(torch.int32) + torch.randint_like(x, 2**16, dtype=torch.int32)
    return (bits & -(2**16)).view(torch.float32).to(LOW)


class StochasticAdam(torch.optim.Optimizer):
    """Adam that computes in fp32 and rounds weights and moments to bf16 at random."""

    def __init__(self, params, lr: float, betas=(0.9, 0.999), eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        pairs = [(p, group) for group in self.param_groups for p in group["params"]]
        for p, group in pairs:
            if p.grad is None:
                continue
            if p.dtype != LOW:
                raise ValueError(f"StochasticAdam takes parameters in bf16, not {p.dtype}")
            state, (beta1, beta2) = self.state[p], group["betas"]
            if not state:
                state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["t"] += 1
            g, t = p.grad.float(), state["t"]
            m = state["m"].float().lerp(g, 1 - beta1)
            v = state["v"].float().lerp(g * g, 1 - beta2)
            step = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
            new = p.float() - group["lr"] * step
            for stored, value in ((p, new), (state["m"], m), (state["v"], v)):
                stored.copy_(round_stochastically(value))


def train(
    way: str, ids: torch.Tensor, letters: int, seed: int = 0
) -> tuple[list[float], dict[str, float], Model]:
    """Return losses, seconds per step, bytes of state and of activations, and the model."""
    dtype, autocast, scaling, stochastic = WAYS[way]
    torch.manual_seed(seed)
    model = Model(letters).to(dtype)
    chooser = StochasticAdam if stochastic else torch.optim.Adam
    optimizer = chooser(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", enabled=scaling)
    assert scaler.is_enabled() == (autocast == HALF)  # fp16 underflows without, bf16 does not
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def record(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    losses, seconds = [], []
    data = torch.Generator().manual_seed(seed + 1)
    for _ in range(STEPS):
        at = torch.randint(len(ids) - S - 1, (B,), generator=data)
        batch = ids[at[:, None] + torch.arange(S + 1)]  # [b, s+1]
        saved.clear()
        begin = time.perf_counter()
        region = torch.autocast("cpu", autocast or LOW, enabled=autocast is not None)
        with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t), region:
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    state = [s for states in optimizer.state.values() for s in states.values()]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [s for s in state if torch.is_tensor(s) and s.dim()]
    psi = sum(p.numel() for p in model.parameters())
    costs = {
        "ms": 1000 * statistics.median(seconds),
        "state": sum(t.nbytes for t in tensors) / psi,
        "saved": sum(saved.values()) / 2**20,
    }
    return losses, costs, model


@torch.no_grad()
def report_sampler(model: Model, ids: torch.Tensor) -> None:
    """How far a trainer and a sampler of the same weights differ, in bf16 and in fp16."""
    windows = ids[torch.arange(0, len(ids) - S - 1, S)[:, None] + torch.arange(S + 1)]

    def score(model: Model, dtype: torch.dtype) -> torch.Tensor:
        """The log-probability [b, s] of each letter, computed in `dtype`."""
        logits = model(windows[:, :-1])
        assert logits.dtype == dtype
        return F.log_softmax(logits.float(), -1).gather(-1, windows[:, 1:, None])[..., 0]

    gaps, exact = {}, score(model, torch.float32)
    print("autocast against weights in 16 bits: mean difference of a log-probability")
    for name, dtype in (("bf16", LOW), ("fp16", HALF)):
        with torch.autocast("cpu", dtype):
            trainer = score(model, dtype)
        sampler = score(copy.deepcopy(model).to(dtype), dtype)
        gaps[name] = (trainer - sampler).abs().mean().item()
        print(f"  {name}  ≈{gaps[name]:.4f}")
        assert (trainer - exact).abs().mean() < 0.02  # both evaluate the same model
    assert 5 < gaps["bf16"] / gaps["fp16"] < 12  # three more bits of mantissa: about 8


def check(ids: torch.Tensor, letters: int) -> None:
    """Check that attention is causal, and that a moment decays after one large gradient."""
    two = ids[:S].repeat(2, 1)
    two[1, -1] = (two[1, -1] + 1) % letters
    logits = Model(letters)(two)
    torch.testing.assert_close(logits[0, :-1], logits[1, :-1])
    p = nn.Parameter(torch.zeros(4096, dtype=LOW))
    optimizer = StochasticAdam([p], lr=RATE)
    for step in range(STEPS):
        p.grad = torch.full_like(p, float(step == 0))
        optimizer.step()
    v = optimizer.state[p]["v"].double().mean().item()
    assert abs(v / (0.001 * 0.999 ** (STEPS - 1)) - 1) < 0.02


def draw(curves: dict[str, list[float]]) -> None:
    """Draw the loss of each way minus the loss of fp32, as a mean of 30 steps."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "precisions", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for losses, colour in zip(curves.values(), COLOURS, strict=True):
        behind = [loss - exact for loss, exact in zip(losses, curves["fp32"], strict=True)]
        smooth = [statistics.mean(behind[max(0, i - 29) : i + 1]) for i in range(STEPS)]
        axes.plot(smooth, color=colour, linewidth=1.6)
    end = 0.04  # nats: fixed, because the losses differ slightly between processors
    axes.text(STEPS - 30, 0.95 * end, "bf16 model", color=COLOURS[3], ha="right", va="top")
    axes.text(2, -0.18 * end, "bf16 autocast", color=COLOURS[1], va="top")
    axes.text(48, -0.18 * end, "fp16 + scaler", color=COLOURS[2], va="top")
    axes.text(94, -0.18 * end, "bf16 stochastic", color=COLOURS[4], va="top")
    axes.set(xlabel="step", ylabel="loss above fp32's (nats)")
    axes.set_ylim(-0.5 * end, 1.15 * end)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("precisions.svg", transparent=True, metadata={"Date": None})


def above(losses: list[float], exact: list[float]) -> float:
    """Mean of the last 40 losses minus the same mean for fp32, in nats."""
    return statistics.mean(losses[-40:]) - statistics.mean(exact[-40:])


def main() -> None:
    torch.set_num_threads(1)
    text = codecs.decode(this.s, "rot13")
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(c) for c in text])
    check(ids, len(letters))
    curves, models = {}, {}
    titles = ("step", "state per parameter", "saved for backward", "last 40 losses")
    print(f"{'':15}" + "".join(f"{title:>{len(title) + 4}}" for title in titles))
    for way in WAYS:
        losses, costs, models[way] = train(way, ids, len(letters))
        curves[way] = losses
        step, last = f"≈{costs['ms']:.0f} ms", f"≈{statistics.mean(losses[-40:]):.2f}"
        print(
            f"{way:15}{step:>8}{costs['state']:17.2f} bytes{costs['saved']:18.2f} MiB{last:>18}"
        )
    gaps = {way: [above(losses, curves["fp32"])] for way, losses in curves.items()}
    for seed in (1, 2):
        exact = train("fp32", ids, len(letters), seed)[0]
        for way in AGAIN:
            gaps[way].append(above(train(way, ids, len(letters), seed)[0], exact))
    print("the last 40 losses above those of fp32, for seeds 0, 1 and 2")
    for way in AGAIN:
        print(f"  {way:15}" + "".join(f"  ≈{round(gap, 2) + 0:.2f}" for gap in gaps[way]))
    for way, found in gaps.items():
        assert all((gap > 0.01) == (way == "bf16 model") for gap in found), (way, found)
    report_sampler(models["fp32"], ids)
    draw(curves)


if __name__ == "__main__":
    main()
