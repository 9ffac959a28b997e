"""One long prompt delays all other requests, and prefill in chunks bounds the delay.

Seven answers are in progress when a prompt of 1,536 tokens arrives. If the prompt runs whole,
the next token of all seven answers must wait for it. With a budget of 135 tokens per step,
each step runs the 7 tokens of the answers and 128 tokens of the prompt. The cache and the
logits are the same at the end. Draws chunked_prefill.svg.
"""

import time

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

CONTEXT, LONG, BUDGET = 2048, 1536, 135  # 7 + 128


class CachedBlock(nn.Module):
    """Attention, then an MLP; the caller decides what the new tokens attend to."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, attend) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # each [b, a, s, h/a]
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CachedCharModel(nn.Module):
    """ids and positions [b, s] -> logits [b, s, v]; `attends` has one function per layer."""

    def __init__(self, vocabulary=42, hidden=64, heads=4, layers=2, context=CONTEXT) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(CachedBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attends) -> torch.Tensor:
        x = self.token(ids) + self.position(positions)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, attend)
        return self.head(self.norm(x))


def without_cache(model: CachedCharModel, ids: list[int]) -> torch.Tensor:
    """Logits [s, v] of the whole sequence at once."""

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    positions = torch.arange(len(ids))[None]
    return model(torch.tensor([ids]), positions, [causal] * len(model.blocks))[0]


# --8<-- [start:engine]
class ChunkedSlots:
    """A cache [layers, 2, slots, a, context, h/a]; every slot has its own length."""

    def __init__(self, model: CachedCharModel, slots: int) -> None:
        self.model = model
        hidden, heads = model.token.embedding_dim, model.blocks[0].heads
        self.cache = torch.zeros(len(model.blocks), 2, slots, heads, CONTEXT, hidden // heads)
        self.length = [0] * slots

    def run(self, slot: int, ids: list[int]) -> torch.Tensor:
        """Append `ids` to the sequence of a slot; logits [v] after them."""
        start, end = self.length[slot], self.length[slot] + len(ids)
        positions = torch.arange(start, end)
        visible = None  # at the start of a sequence, is_causal does the same
        if start:
            visible = torch.arange(end) <= positions[:, None]  # causal, earlier chunks too

        def attend(layer: int):
            def write_and_mix(q, k, v):
                here = self.cache[layer, :, slot]  # [2, a, context, h/a]
                here[:, :, start:end] = torch.cat([k, v])
                return F.scaled_dot_product_attention(
                    q, *here[:, None, :, :end], attn_mask=visible, is_causal=start == 0
                )

            return write_and_mix

        attends = [attend(layer) for layer in range(len(self.model.blocks))]
        logits = self.model(torch.tensor([ids]), positions[None], attends)[0, -1]
        self.length[slot] = end
        return logits


def serve(
    model: CachedCharModel, prompt: list[int], budget: int
) -> tuple[ChunkedSlots, list, list]:
    """24 steps of at most `budget` tokens; the prompt arrives at the fifth. Gaps and logits."""
    engine, gaps, logits, done = ChunkedSlots(model, 8), [], [], 0
    for slot in range(7):
        engine.run(slot, list(range(slot, slot + 16)))
    for step in range(24):
        before, begin = sum(engine.length), time.process_time()
        latest = [engine.run(slot, [step]) for slot in range(7)]
        if step >= 4 and done < len(prompt):  # the rest of the budget is for the prompt
            chunk = prompt[done : done + budget - len(latest)]
            latest.append(engine.run(7, chunk))
            done += len(chunk)
        gaps.append(time.process_time() - begin)
        assert sum(engine.length) - before <= budget
        logits.append(torch.stack(latest))
    return engine, gaps, logits


# --8<-- [end:engine]


def draw(gaps: dict[str, list[float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "chunked", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.4))
    for (words, times), colour, shift in zip(
        gaps.items(), ("#c2410c", "#0f766e"), (-0.2, 0.2), strict=True
    ):
        steps = [step + shift for step in range(len(times))]
        axes.bar(steps, [1e3 * seconds for seconds in times], 0.4, color=colour)
        axes.text(*{"whole": (5, 0.9), "in chunks": (9, 0.3)}[words], words, color=colour,
                  transform=axes.get_xaxis_transform())  # fmt: skip
    assert max(gaps["in chunks"]) < max(gaps["whole"]), "chunks bound the worst gap"
    level = 1e3 * sorted(gaps["in chunks"][:4])[1]
    assert level < 1e3 * min(gaps["in chunks"][4:16]), "a usual step is without the prompt"
    axes.axhline(level, color="#52525b", linewidth=1)
    axes.annotate("the prompt\ncomes", (3.8, 0.08), (-0.9, 0.4), color="#52525b",
                  xycoords=axes.get_xaxis_transform(),
                  arrowprops={"arrowstyle": "->", "color": "#52525b"})  # fmt: skip
    axes.set(xlabel="step", ylabel="time until every sequence\nhas its next token, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.patch.set_visible(False)
    figure.tight_layout()
    figure.savefig("chunked_prefill.svg", transparent=True, metadata={"Date": None})


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CachedCharModel(hidden=128)
    prompt = torch.randint(42, (LONG,)).tolist()
    serve(model, prompt[:64], BUDGET)  # warm up
    shown, engines, ends, firsts = {}, {}, {}, {}
    print("            steps with prompt   usual gap   worst gap   the prompt's first token")
    for words, budget in (("whole", 7 + LONG), ("in chunks", BUDGET)):
        gaps, first, chunks = None, [], -(-LONG // (budget - 7))
        covered = 0.0  # the fraction of the whole run that the gaps account for
        for _ in range(9):  # processor time, the shortest of nine: other programs do not count
            begin = time.process_time()
            engines[words], times, logits = serve(model, prompt, budget)
            whole = time.process_time() - begin
            covered = max(covered, sum(times) / whole)
            gaps = times if gaps is None else list(map(min, gaps, times))
            first.append(sum(times[4 : 4 + chunks]))
            others = sum(times[:4]) + sum(times[4 + chunks :])  # steps without the prompt
            assert first[-1] + others <= whole, "the steps are longer than the run"
        assert [len(step) for step in logits] == [7] * 4 + [8] * chunks + [7] * (20 - chunks)
        assert covered > 0.8, "a gap is not the time of its whole step"
        ends[words], shown[words], firsts[words] = logits, gaps, min(first)
        usual, worst = sorted(gaps[:4])[1], max(gaps)
        row = [1e3 * usual, 1e3 * worst, 1e3 * min(first)]
        assert row == sorted(row)
        assert all(gap <= worst for gap in gaps)
        assert usual < min(gaps[4 : 4 + chunks])  # a step with a piece of the prompt
        assert min(first) > 0.999 * sum(gaps[4 : 4 + chunks])  # it needs all chunks
        print(f"{words:10}  {chunks:14}      ≈{row[0]:.1f} ms   ≈{row[1]:.0f} ms"
              f"      ≈{row[2]:.0f} ms")  # fmt: skip
    one, other = engines["whole"], engines["in chunks"]
    torch.testing.assert_close(one.cache, other.cache, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ends["whole"][4][7], ends["in chunks"][15][7])
    for a, b in zip(ends["whole"], ends["in chunks"], strict=True):
        torch.testing.assert_close(a[:7], b[:7])
    truth = without_cache(model, prompt)[-1]
    torch.testing.assert_close(ends["in chunks"][15][7], truth, rtol=1e-4, atol=1e-4)
    for slot in range(7):
        ids = [*range(slot, slot + 16), *range(24)]
        truth = without_cache(model, ids)[-24:]
        seen = torch.stack([step[slot] for step in ends["in chunks"]])
        torch.testing.assert_close(seen, truth, rtol=1e-4, atol=1e-4)
    print("keys, values and logits are equal")
    assert firsts["in chunks"] > firsts["whole"], "the long prompt waits longer in chunks"
    draw(shown)


if __name__ == "__main__":
    main()
