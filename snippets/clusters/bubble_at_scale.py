"""Simulates pipeline bubbles for a constant batch on more and more GPUs: 1F1B and interleaved.

Every forward and backward of every stage starts as soon as its input and its GPU are ready.
With N GPUs, TP 8 and p = 16, a batch of 2,048 sequences gives each pipeline m = 2048·128/N
micro-batches, and c times as many if c GPUs share a sequence (CP). At the end, p and c vary.
Draws bubble_at_scale.svg.
"""

import itertools
import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

STAGES, TENSOR, BATCH = 16, 8, 2048
FORWARD, BACKWARD = 1.0, 2.0  # of one micro-batch on one stage


# --8<-- [start:order]
def order(rank: int, p: int, m: int, v: int) -> list[tuple[bool, int, int]]:
    """(forward?, micro-batch, chunk) of a rank: 1F1B, or Megatron's interleaved for v > 1.

    m is a multiple of p, or less than p (Megatron has no interleaved schedule for that case).
    """

    def unit(forward: bool, k: int) -> tuple[bool, int, int]:
        if v == 1:
            return forward, k, 0
        g = min(m, p)  # groups of g micro-batches go through one chunk after the other
        piece = k // g % v
        return forward, k // (g * v) * g + k % g, piece if forward else v - 1 - piece

    warm = p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p
    warm = m * v if v > 1 and m < p else min(warm, m * v)  # too few: all forwards first
    ops = [unit(True, k) for k in range(warm)]
    for k in range(m * v - warm):
        ops += [unit(True, warm + k), unit(False, k)]
    return ops + [unit(False, k) for k in range(m * v - warm, m * v)]


def simulate(p: int, m: int, v: int, slow: float = 1.0) -> float:
    """Seconds per step, if the last rank needs `slow` times as long as the others."""
    ended: dict[tuple[bool, int, int], float] = {}  # (forward?, micro-batch, virtual stage)
    queues, at, clock = [order(r, p, m, v) for r in range(p)], [0] * p, [0.0] * p
    last = p * v - 1
    while any(at[r] < len(queues[r]) for r in range(p)):
        before = sum(at)
        for r in range(p):
            while at[r] < len(queues[r]):
                forward, batch, piece = queues[r][at[r]]
                stage = piece * p + r
                if forward:
                    needs = (True, batch, stage - 1) if stage else None
                else:
                    needs = (True, batch, stage) if stage == last else (False, batch, stage + 1)
                if needs is not None and needs not in ended:
                    break
                takes = (FORWARD if forward else BACKWARD) / v * (slow if r == p - 1 else 1)
                clock[r] = max(clock[r], ended.get(needs, 0.0)) + takes
                ended[forward, batch, stage] = clock[r]
                at[r] += 1
        assert sum(at) > before, "the schedule deadlocks"
    return max(clock)


# --8<-- [end:order]


# --8<-- [start:predict]
def predict(p: int, m: int, v: int, slow: float = 1.0) -> float:
    full = m * slow + (p - 1) / v  # the last stage works without a pause once it has begun
    trip = p + (m - 1) / v  # one micro-batch passes all chunks, and the others follow it
    return max(full, trip) * (FORWARD + BACKWARD)


# --8<-- [end:predict]


def micro_batches(gpus: int, p: int = STAGES, c: int = 1) -> int:
    return BATCH * TENSOR * c * p // gpus


def share(p: int, m: int, v: int) -> float:
    seen = simulate(p, m, v)
    assert math.isclose(seen, predict(p, m, v)), (p, m, v)
    return m * (FORWARD + BACKWARD) / seen


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "bubble", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    for v, colour in ((1, "#c2410c"), (2, "#7c3aed"), (4, "#a16207"), (8, "#0b6e99")):
        sizes = [128 * 2**k for k in range(12)]
        ms = [micro_batches(n) for n in sizes]
        useful = [m * (FORWARD + BACKWARD) / predict(STAGES, m, v) for m in ms]
        axes.plot(sizes, useful, color=colour, linewidth=2)
        for n, m in zip(sizes, ms, strict=True):
            if m <= 64:
                seen = m * (FORWARD + BACKWARD) / simulate(STAGES, m, v)
                axes.plot(n, seen, "o", color=colour, markersize=5)
        label = "1F1B" if v == 1 else f"{v} chunks"
        axes.text(250, 0.62 - 0.11 * math.log2(v), f"● {label}", color=colour)
    axes.set(xscale="log", ylim=(0, 1.05), xlabel="GPUs that share a batch of 2,048 sequences")
    axes.set_ylabel("fraction of the step\nin which a stage works")
    ticks = [128, 1024, 8192, 65536]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("bubble_at_scale.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    for rank in range(STAGES):  # 1F1B stores one micro-batch per stage from here to the end
        steps = (1 if forward else -1 for forward, _, _ in order(rank, STAGES, 64, 1))
        assert max(itertools.accumulate(steps)) == STAGES - rank
    print("fraction of the step in which a stage works, by formula and simulated")
    print("   GPUs    m      1F1B          2 chunks      4 chunks      8 chunks")
    shares = {}
    for n in (1_024, 4_096, 8_192, 16_384, 32_768, 131_072):
        m, cells = micro_batches(n), []
        for v in (1, 2, 4, 8):
            ideal, predicted = m * (FORWARD + BACKWARD), predict(STAGES, m, v)
            if m <= 64:
                seen = simulate(STAGES, m, v)
                assert math.isclose(seen, predicted), (n, v)
                cells.append(f"{ideal / predicted:.1%} {ideal / seen:.1%}")
            else:
                cells.append(f"{ideal / predicted:.1%} –    ")
            shares[n, v] = ideal / predicted
        print(f"{n:7,} {m:4}   {'   '.join(cells)}".rstrip())

    shorter = {p: share(p, micro_batches(32_768, p), 8) for p in (16, 8, 4, 2)}
    print("32,768 GPUs, 8 chunks, shorter pipelines:")
    print("  " + ", ".join(f"p = {p}: {works:.1%}" for p, works in shorter.items()))
    wider = {c: share(STAGES, micro_batches(131_072, c=c), 8) for c in (1, 2, 4, 8, 16)}
    assert all(wider[2 * c] > 1.8 * wider[c] for c in (1, 2, 4))
    assert max(shorter.values()) < BATCH * TENSOR / 32_768 + 1e-9  # at most m/p, whatever p is
    print("131,072 GPUs, 8 chunks, p = 16, each sequence on more GPUs:")
    print("  " + ", ".join(f"CP {c}: {works:.1%}" for c, works in wider.items()))
    print("rate of one of 16,384 GPUs / rate of one of 8,192 (Llama 3: 400/430 = 0.93):")
    ratios = [f"{v}: {shares[16_384, v] / shares[8_192, v]:.2f}" for v in (1, 2, 4, 8)]
    print("  chunks " + ", ".join(ratios))
    seen, predicted = simulate(16, 32, 1, slow=1.1), predict(16, 32, 1, slow=1.1)
    assert math.isclose(seen, predicted)
    print(
        f"one stage of 16 is 10% slower, m = 32, 1F1B: the step is "
        f"{seen / predict(16, 32, 1) - 1:.1%} longer"
    )
    draw()


if __name__ == "__main__":
    main()
