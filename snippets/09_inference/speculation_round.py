"""One round of speculative decoding: drafts, one check, and the tokens that it gives.

The draft proposes four tokens, one after the other. The target checks all four in one step. It
keeps drafts up to the first refusal, and it always adds one token of its own. The program lists
all outcomes of a round, if each draft is kept with the same probability and independently. It
compares the mean with the closed formula, and draws speculation_round.svg.
"""

import itertools

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ETA, GAMMA = 0.7, 4  # the acceptance rate, and the drafts of a round
STEP, DRAFT = 4.5, 0.3  # ms: a step of the target (also with five tokens), and of the draft


# --8<-- [start:outcomes]
def outcomes(eta: float, gamma: int) -> list[float]:
    """The probability of 0, 1, …, gamma kept drafts: add up all ways to keep and refuse."""
    chances = [0.0] * (gamma + 1)
    for keeps in itertools.product([True, False], repeat=gamma):
        chance = 1.0
        for keep in keeps:
            chance *= eta if keep else 1 - eta
        kept = keeps.index(False) if False in keeps else gamma  # up to the first refusal
        chances[kept] += chance
    return chances


# --8<-- [end:outcomes]


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "speculation", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.2))

    def box(left: float, row: float, width: float, colour: str, words: str = "") -> None:
        axes.barh(row, width, 0.62, left, color=colour, ec="white", lw=1, align="center")
        axes.text(left + width / 2, row, words, color="white", ha="center", va="center")

    for i in range(3):
        box(i * STEP, 0, STEP, "#0b6e99", f"step {i + 1}")
        axes.text((i + 1) * STEP, 0.62, f"token {i + 1}", ha="center", fontsize=11)
    for i in range(GAMMA):
        box(i * DRAFT, 2, DRAFT, "#c2410c")
    end = GAMMA * DRAFT
    box(end, 2, STEP, "#0b6e99", "check of 4 drafts")
    axes.text(0, 1.45, "4 drafts", color="#c2410c", fontsize=11)
    words = ["draft 1: kept", "draft 2: kept", "draft 3: refused", "token of the target"]
    colours = ["#15803d", "#15803d", "#b91c1c", "#15803d"]
    for i, (text, colour) in enumerate(zip(words, colours, strict=True)):
        axes.text(
            end + STEP + 0.3, 1.3 + 0.48 * i, text, color=colour, va="center", fontsize=11
        )
    axes.set_yticks([0, 2], ["plain", "with drafts"])
    axes.set(xlabel="time (ms)", xlim=(0, 14), ylim=(3.1, -0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("speculation_round.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    chances = outcomes(ETA, GAMMA)
    print(f"each draft is kept with probability {ETA}; {GAMMA} drafts in a round")
    print("drafts kept   tokens   probability")
    for kept, chance in enumerate(chances):
        print(f"{kept:11} {kept + 1:8} {chance:13.4f}")
    mean = sum((kept + 1) * chance for kept, chance in enumerate(chances))
    closed = (1 - ETA ** (GAMMA + 1)) / (1 - ETA)
    assert abs(sum(chances) - 1) < 1e-12 and abs(mean - closed) < 1e-12
    time = GAMMA * DRAFT + STEP
    print(f"on average {mean:.2f} tokens in {time:.1f} ms, plain {time / STEP:.2f} tokens")
    assert mean > 2 * time / STEP
    draw()


if __name__ == "__main__":
    main()
