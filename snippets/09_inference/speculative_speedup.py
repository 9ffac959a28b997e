"""When does speculation help? Predicted from the cost of a draft and of a check, and measured.

Draft and target are stacks of matrices. A random number decides with probability η whether a
draft is kept, so that η is known. Draws speculative_speedup.svg from the formula.
"""

import random
import time
from functools import partial

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch.utils.flop_counter import FlopCounterMode

HIDDEN = 2048


# --8<-- [start:formula]
def tokens(eta: float, gamma: int) -> float:
    """Tokens per round: one, and one more for each draft if all before it were kept."""
    return sum(eta**i for i in range(gamma + 1))


def speedup(eta: float, gamma: int, draft: float, check: float) -> float:
    """The speed-up over plain decoding. `draft` and `check` are in steps of the target."""
    return tokens(eta, gamma) / (gamma * draft + check)


# --8<-- [end:formula]


def stack(layers: int) -> list[torch.Tensor]:
    return [torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5 for _ in range(layers)]


def forward(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in weights:
        x = x @ weight.T
    return x


# --8<-- [start:run]
def generate(target, draft, eta: float, gamma: int, rounds: int, coin: random.Random) -> int:
    """Run rounds of speculation. Return the number of tokens."""
    given = 0
    for _ in range(rounds):
        x = torch.ones(1, HIDDEN)
        for _ in range(gamma):
            x = forward(draft, x)
        forward(target, torch.ones(gamma + 1, HIDDEN))
        kept = 0
        while kept < gamma and coin.random() < eta:
            kept += 1
        given += kept + 1
    return given


# --8<-- [end:run]


def clock(work) -> tuple[float, object]:
    """Return the processor time in seconds, without that of other programs, and the result."""
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "spec", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    gammas = range(17)
    for eta, color in ((0.9, "#0b6e99"), (0.7, "#7c3aed"), (0.4, "#c2410c")):
        curve = [speedup(eta, g, 0.05, 1) if g else 1 for g in gammas]
        axes.plot(gammas, curve, "-o", markersize=4, color=color)
        axes.text(4, curve[4] * 1.06 + 0.06, f"η = {eta}", color=color, ha="right")
    axes.plot([0, 16], [1, 1], color="#52525b", linestyle=":", linewidth=1.2)
    axes.set(xlabel="tokens drafted per round, γ", ylabel="times as fast", xlim=(0, 16.5))
    axes.set_xticks(range(0, 17, 4))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("speculative_speedup.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for eta in (0.3, 0.8):
        closed = (1 - eta**6) / (1 - eta)
        assert abs(tokens(eta, 5) - closed) < 1e-12
        coin = random.Random(0)
        drawn = generate([], [], eta, 5, 20_000, coin) / 20_000
        print(f"η = {eta}, γ = 5: {closed:.3f} tokens per round, simulated ≈{drawn:.3f}")
        assert abs(drawn - closed) < 0.05

    target, draft = stack(12), stack(1)  # 192 MiB, and a twelfth
    assert sum(w.nbytes for w in target) == 12 * sum(w.nbytes for w in draft) == 192 << 20
    gamma, rounds, etas = 4, 10, (0.1, 0.5, 0.9)
    one, several = torch.ones(1, HIDDEN), torch.ones(gamma + 1, HIDDEN)
    forward(target, several)
    works = {
        "step": lambda: forward(target, one),
        "check": lambda: forward(target, several),
        "draft": lambda: forward(draft, one),
    } | {eta: partial(generate, target, draft, eta, gamma, 1, random.Random(1)) for eta in etas}
    products = {"step": 12, "check": 5 * 12, "draft": 1} | dict.fromkeys(etas, 4 * 1 + 5 * 12)
    for name, work in works.items():  # a product of one row and one matrix: 2 · HIDDEN² FLOPs
        with FlopCounterMode(display=False) as counter:
            work()
        assert counter.get_total_flops() == 2 * HIDDEN**2 * products[name], name
    results: dict[object, list[tuple]] = {name: [] for name in works}
    for _ in range(rounds):  # in turn, so that other load slows all of them
        for name, work in works.items():
            results[name].append(clock(work))
    took = {name: sorted(s for s, _ in pairs)[rounds // 2] for name, pairs in results.items()}
    given = {eta: sum(count for _, count in results[eta]) for eta in etas}
    step, chi, delta = took["step"], took["check"] / took["step"], took["draft"] / took["step"]
    print(f"one token ≈{1e3 * step:.1f} ms; a check of {gamma + 1} costs ≈{chi:.2f} of that, "
          f"a draft ≈{delta:.2f}")  # fmt: skip
    print("η      predicted   measured")
    for eta in etas:
        # from the tokens that these coins gave, not from their mean over many rounds;
        # with η = 0 the formula counts one token for each round
        predicted = given[eta] / rounds * speedup(0, gamma, delta, chi)
        measured = given[eta] / rounds * step / took[eta]
        print(f"{eta}    ≈{predicted:.2f}       ≈{measured:.2f}")
        assert 0.5 < measured / predicted < 2, "a round is not its drafts and its check"
    assert given[0.9] > 2 * given[0.1], "kept drafts should be worth more than refused ones"

    print("\nthe best γ, if a check costs one step       a draft costs 0.05      0.2")
    for eta in (0.4, 0.7, 0.9):
        best = [max(range(1, 33), key=lambda g, a=eta, c=c: speedup(a, g, c, 1))
                for c in (0.05, 0.2)]  # fmt: skip
        gains = [speedup(eta, g, c, 1) for g, c in zip(best, (0.05, 0.2), strict=True)]
        print(f"  η = {eta}                               {best[0]:9}: {gains[0]:.2f} times"
              f"{best[1]:5}: {gains[1]:.2f} times")  # fmt: skip
    assert speedup(0.1, 4, 0.2, 1) < 1 and speedup(0.5, 2, 0.25, 2) == 1.75 / 2.5
    draw()


if __name__ == "__main__":
    main()
