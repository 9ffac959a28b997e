"""Prefill and decode: which tokens a step computes, what it reads, and what it waits for.

The program draws one request as a table: a row for each step, and a column for each token. It
also prints the time of the FLOPs and of the bytes of each step, for Llama 3 8B on one H100 at
the speeds of the data sheet. Attention itself is left out. Draws prefill_and_decode.svg.

Look at the two times of a row: the step cannot be faster than the larger one.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

FLOPS, BANDWIDTH = 989e12, 3350e9  # of an H100 with bf16: FLOP/s, bytes/s
LAYERS, HEAD = 6.98e9, 0.525e9  # parameters in products: of the layers, and of the LM head
CACHE = 128 * 1024  # bytes of keys and values per token
PROMPT, STEPS = 2048, 3


# --8<-- [start:step]
def step(new: int, cached: int) -> tuple[float, float]:
    """Times in s of the FLOPs and of the bytes of a step with `new` tokens; one gets logits."""
    flops = 2 * LAYERS * new + 2 * HEAD
    read = 2 * (LAYERS + HEAD) + CACHE * cached
    return flops / FLOPS, read / BANDWIDTH


# --8<-- [end:step]


def draw(rows: list[tuple[str, float, float]]) -> None:
    """The table of tokens; eight prompt tokens stand for all of them."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "prefill", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.3))
    shown = 8
    colours = {"computed": "#c2410c", "read": "#0b6e99", "free": "none"}
    for row, (name, compute, read) in enumerate(rows):
        new = shown if row == 0 else 1
        cached = 0 if row == 0 else shown + row - 1
        for column in range(shown + STEPS):
            kind = (
                "read" if column < cached else "computed" if column < cached + new else "free"
            )
            colour = colours[kind]
            axes.add_patch(
                plt.Rectangle((column, row), 0.9, 0.8, fc=colour, ec="#a1a1aa", lw=0.8)
            )
        axes.text(-0.2, row + 0.4, name, ha="right", va="center")
        words = f"{1e3 * compute:.2f} ms | {1e3 * read:.2f} ms"
        axes.text(shown + STEPS + 0.3, row + 0.4, words, va="center")
    axes.text(shown / 2, -0.4, "prompt", ha="center")
    axes.text(shown + STEPS / 2, -0.4, "answer", ha="center")
    axes.text(shown + STEPS + 0.3, -0.4, "FLOPs | bytes")
    for column, (kind, words) in enumerate(
        (("computed", "computed in this step"), ("read", "keys and values from the cache"))
    ):
        left = 6.6 * column
        box = plt.Rectangle((left, len(rows) + 0.3), 0.5, 0.45, fc=colours[kind])
        axes.add_patch(box)
        axes.text(left + 0.7, len(rows) + 0.52, words, va="center", fontsize=11)
    axes.set(xlim=(-2.7, 15.8), ylim=(len(rows) + 1, -0.9))
    axes.axis("off")
    figure.tight_layout()
    figure.savefig("prefill_and_decode.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    rows = [("prefill", *step(PROMPT, 0))]
    rows += [(f"decode {i + 1}", *step(1, PROMPT + i)) for i in range(STEPS)]
    print("step       new tokens   cached      FLOPs      bytes   waits for")
    for i, (name, compute, read) in enumerate(rows):
        new, cached = (PROMPT, 0) if i == 0 else (1, PROMPT + i - 1)
        bound = "compute" if compute > read else "memory"
        times = f"{1e3 * compute:8.2f} ms{1e3 * read:8.2f} ms"
        print(f"{name:10}{new:11,}{cached:9,}{times}   {bound}")
        assert bound == ("compute" if i == 0 else "memory")
    prefill, decode = max(rows[0][1:]), max(rows[1][1:])
    print(f"the prompt takes the time of {prefill / decode:.1f} tokens of the answer")
    assert PROMPT / (prefill / decode) > 300
    draw(rows)


if __name__ == "__main__":
    main()
