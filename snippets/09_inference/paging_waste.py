"""How much of a cache contains tokens: rows for the longest case, exact rows, and blocks.

The queue is never empty. Each sequence grows by a token per step until it ends. The pool is
small: 16,384 tokens, which are 2 GiB at 128 KiB per token. Draws paging_waste.svg.
"""

import math
import random
from collections import deque
from dataclasses import dataclass

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

POOL, LONGEST, STEPS, WARM = 16_384, 2048, 1500, 500


def lengths() -> list[tuple[int, int]]:
    """Prompt length and total length of every request; a few are ten times the median."""
    dice, result = random.Random(0), []
    for _ in range(3000):
        prompt = min(1024, 16 + int(dice.lognormvariate(math.log(120), 0.8)))
        answer = min(1024, 8 + int(dice.lognormvariate(math.log(120), 0.8)))
        result.append((prompt, prompt + answer))
    return result


def contiguous(exact: bool) -> tuple[float, float]:
    """Mean number of sequences and of cached tokens, with a row of places for each sequence.

    A row has LONGEST places. If `exact`, it has exactly the places that the request will need,
    and it is put into the first gap that is large enough.
    """
    waiting, rows = deque(lengths()), []  # a row: [start, size, tokens now, tokens in the end]
    running = held = 0
    for step in range(STEPS):
        while True:
            size = waiting[0][1] if exact else LONGEST
            ends = [0, *(row[0] + row[1] for row in rows)]
            starts = [*(row[0] for row in rows), POOL]
            gap = next((i for i, end in enumerate(ends) if starts[i] - end >= size), None)
            if gap is None:
                break
            prompt, whole = waiting.popleft()
            rows.insert(gap, [ends[gap], size, prompt, whole])
        for row in rows:
            row[2] += 1
        rows = [row for row in rows if row[2] < row[3]]
        if step >= WARM:
            running, held = running + len(rows), held + sum(row[2] for row in rows)
    return running / (STEPS - WARM), held / (STEPS - WARM)


# --8<-- [start:blocks]
@dataclass(eq=False)  # equal lengths do not make two sequences equal
class Sequence:
    tokens: int
    whole: int  # tokens in the end
    blocks: int


def paged(block: int) -> tuple[float, float, float, int]:
    """The same with blocks; also empty places in the last block, and preemptions."""
    waiting: deque[tuple[int, int]] = deque(lengths())
    sequences: list[Sequence] = []
    running = held = empty = preempted = 0
    free = POOL // block
    for step in range(STEPS):
        while free - -(-(waiting[0][0] + 1) // block) >= 0.02 * POOL / block:  # a reserve of 2%
            prompt, whole = waiting.popleft()
            sequences.append(Sequence(prompt, whole, -(-prompt // block)))
            free -= sequences[-1].blocks
        for sequence in list(sequences):
            full = sequence.tokens == sequence.blocks * block
            while full and free == 0 and sequence in sequences:
                victim = sequences.pop()  # the latest arrival is computed again later
                free += victim.blocks
                waiting.appendleft((victim.tokens, victim.whole))
                preempted += 1
            if sequence not in sequences:
                continue
            sequence.blocks += full
            free -= full
            sequence.tokens += 1
        for sequence in [s for s in sequences if s.tokens >= s.whole]:
            free += sequence.blocks
            sequences.remove(sequence)
        over = [s.blocks * block - s.tokens for s in sequences]  # empty places of each
        assert all(0 <= places <= block - 1 for places in over)
        assert free + sum(s.blocks for s in sequences) == POOL // block, "a block is lost"
        if step >= WARM:
            running, held = running + len(sequences), held + sum(s.tokens for s in sequences)
            empty += sum(over)
    return running / (STEPS - WARM), held / (STEPS - WARM), empty / running, preempted


# --8<-- [end:blocks]


def draw(blocks: list[int], shares: list[float], longest: float, exact: float) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "paging", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    axes.plot(blocks, [100 * share for share in shares], "o-", color="#0f766e")
    axes.text(30, 98, "blocks", color="#0f766e")
    for level, words in (
        (exact, "rows of the exact length"),
        (longest, "rows for the longest"),
    ):
        axes.axhline(100 * level, color="#52525b", linewidth=1.5)
        axes.text(1, 100 * level + 2, words, color="#52525b")
    axes.set(xscale="log", xlabel="tokens in a block", ylabel="fraction of the pool in use, %")
    axes.set(ylim=(0, 105), xticks=blocks)
    axes.set_xticklabels([str(block) for block in blocks])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.patch.set_visible(False)
    figure.tight_layout()
    figure.savefig("paging_waste.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    head = "cache                    sequences   pool in use   empty in the last block"
    print(f"{head}   preemptions")
    results = {}
    for words, exact in (("rows for the longest", False), ("rows of exact length", True)):
        running, held = contiguous(exact)
        results[words] = held / POOL
        results.setdefault("sequences", running)
        print(f"{words:24} {running:9.1f} {held / POOL:12.0%}")
    sizes, shares, counts = [1, 4, 16, 64, 256], [], []
    for block in sizes:
        running, held, empty, preempted = paged(block)
        shares.append(held / POOL)
        counts.append(running)
        print(
            f"blocks of {block:<14} {running:9.1f} {held / POOL:12.0%} "
            f"{empty:10.1f}, (w−1)/2 = {(block - 1) / 2:5.1f} {preempted:10}"
        )
        assert abs(empty - (block - 1) / 2) <= 0.1 * block
    draw(sizes, shares, results["rows for the longest"], results["rows of exact length"])
    assert results["sequences"] < counts[2] / 6, "six times as many sequences"
    assert shares[2] > 0.95 > 0.6 > results["rows of exact length"]
    assert results["rows for the longest"] < 0.2


if __name__ == "__main__":
    main()
