"""A training run stalls because bf16 rounds its updates away, and there are three remedies.

The task is linear regression with SGD. As soon as an update is smaller than half a step of
bf16, the difference is rounded back to the old weight, and the weight no longer moves. The
three remedies are an fp32 master copy, Kahan compensation, which stores the rounding error in a
second bf16 number, and stochastic rounding. Look at the line "bf16 alone": no weight changes in
the second half of the run. Draws master_weights.svg.
"""

from collections.abc import Callable

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

H, SAMPLES, STEPS, LR = 64, 512, 1500, 0.01
Step = Callable[[torch.Tensor, torch.Tensor], None]  # changes the bf16 weight by the update


def plain() -> Step:
    def step(w: torch.Tensor, update: torch.Tensor) -> None:
        w.copy_(w.float() - update)  # rounded to nearest, which is often w itself

    return step


def master(start: torch.Tensor) -> Step:
    copy = start.float()  # 4 bytes per parameter

    def step(w: torch.Tensor, update: torch.Tensor) -> None:
        copy.sub_(update)
        w.copy_(copy)

    return step


def kahan(start: torch.Tensor) -> Step:
    lost = torch.zeros_like(start)  # the rounding error so far: 2 bytes per parameter

    def step(w: torch.Tensor, update: torch.Tensor) -> None:
        exact = w.float() + (lost.float() - update)
        w.copy_(exact)
        lost.copy_(exact - w.float())

    return step


def stochastic(generator: torch.Generator) -> Step:
    def step(w: torch.Tensor, update: torch.Tensor) -> None:
        bits = (w.float() - update).view(torch.int32)
        noise = torch.randint(0, 2**16, w.shape, generator=generator, dtype=torch.int32)
        w.copy_(((bits + noise) >> 16).to(torch.int16).view(torch.bfloat16))

    return step


def train(
    w: torch.Tensor, step: Step, x: torch.Tensor, y: torch.Tensor
) -> tuple[list[float], int]:
    """Fit y = x·w. Forward and gradient use the weights as they are stored.

    Return the loss of each step, and the number of weights that changed in the second half.
    """
    losses = []
    for i in range(STEPS):
        if i == STEPS // 2:
            halfway = w.clone()
        error = x @ w.float() - y  # [samples]
        losses.append(error.square().mean().item())
        gradient = 2 * x.T @ error / len(y)  # [h]
        step(w, LR * gradient)
    return losses, int((w != halfway).sum())


def stored_bytes(w: torch.Tensor, step: Step) -> int:
    """Return the bytes per parameter of the weight and of the tensors that its step stores."""
    state = [cell.cell_contents for cell in step.__closure__ or ()]
    return sum(t.nbytes for t in (w, *state) if torch.is_tensor(t)) // H


def draw(runs: dict[str, list[float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "master_weights", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    rows = {  # colour, and the place where the label ends
        "bf16 alone": ("#c2410c", (STEPS, 2.5)),
        "all in fp32": ("#52525b", (1080, 1.5e-9)),
        "fp32 master": ("#0b6e99", (1050, 1.5e-3)),
        "Kahan": ("#7c3aed", (1220, 1.5e-3)),
        "stochastic": ("#15803d", (STEPS, 1.5e-3)),
    }
    for name, (colour, at) in rows.items():
        loss = torch.tensor(runs[name]).view(-1, 30).mean(1)  # of 30 steps each
        axes.plot(range(15, STEPS, 30), loss, color=colour, linewidth=2)
        axes.text(*at, name, color=colour, ha="right", va="bottom")
    axes.set(yscale="log", xlabel="step", ylabel="loss", ylim=(5e-10, 300))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("master_weights.svg", transparent=True, metadata={"Date": None})


def check_many_updates(number: int = 401, size: float = 2.0**-12) -> None:
    """Add many updates of both signs to weights of 1, where a step is at least 2^-8."""
    start = torch.ones(2**14, dtype=torch.bfloat16)
    update = size * torch.tensor([1.0, -1.0]).repeat_interleave(2**13)
    exact = 1 - number * update
    ways = plain(), master(start), kahan(start), stochastic(torch.Generator().manual_seed(0))
    weights = [start.clone() for _ in ways]
    for _ in range(number):
        for w, step in zip(weights, ways, strict=True):
            step(w, update)
    assert weights[0].equal(start)  # every update is lost
    assert weights[1].equal(exact.bfloat16()) and weights[2].equal(exact.bfloat16())
    for w, right in zip(weights[3].chunk(2), exact.chunk(2), strict=True):  # right on average
        assert abs((w.float() - right).mean().item()) < 1e-3


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small, so a second thread would only wait
    check_many_updates()
    one = torch.ones((), dtype=torch.bfloat16)
    print(f"bf16: 1 - 0.0019 = {(one - 0.0019).item()}, 1 - 0.0020 = {(one - 0.0020).item()}")
    print(f"bf16: 1 + 0.0039 = {(one + 0.0039).item()}, 1 + 0.0040 = {(one + 0.0040).item()}")

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, H, generator=generator)
    y = x @ torch.randn(H, generator=generator)
    start = torch.zeros(H, dtype=torch.bfloat16)
    steps: dict[str, Step] = {
        "bf16 alone": plain(),
        "stochastic": stochastic(generator),
        "Kahan": kahan(start),
        "fp32 master": master(start),
        "all in fp32": plain(),
    }
    runs = {}
    print("                bytes   loss at the end   weights that changed in the second half")
    for name, step in steps.items():
        w = start.float() if name == "all in fp32" else start.clone()
        size = stored_bytes(w, step)
        runs[name], moved = train(w, step, x, y)
        mark = "" if name == "bf16 alone" else "≈"
        print(f"{name:12}  {size:7}   ≈{runs[name][-1]:.1e}          {mark}{moved} of {H}")
        if name == "bf16 alone":  # the updates are not zero, but at most half a step
            update = LR * 2 * x.T @ (x @ w.float() - y) / SAMPLES
            assert moved == 0 and update.all() and (update / w).abs().max() <= 2.0**-8
    rounded = x @ torch.linalg.lstsq(x, y).solution.bfloat16().float()
    best = (rounded - y).square().mean().item()  # of the best weights, rounded to bf16
    for name in ("stochastic", "Kahan", "fp32 master"):
        assert best / 5 < runs[name][-1] < min(5 * best, runs["bf16 alone"][-1] / 1000)
        assert runs["all in fp32"][-1] < 1e-3 * runs[name][-1]
    draw(runs)


if __name__ == "__main__":
    main()
