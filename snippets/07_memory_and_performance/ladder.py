"""Seven fixes make a slow training script fast, and the losses stay the same.

A small language model trains on documents. The program applies one fix after the other, and it
compares the losses after each fix with the losses of the original script. Times are CPU times
of one thread, so the time in which other programs use the core does not count. Two of the fixes
must gain more than the four fixes after them. Draws ladder.svg.
"""

import random
import time
import zlib
from dataclasses import dataclass, fields, replace

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

B, S, H, HEADS, LAYERS, STEPS = 16, 32, 64, 8, 2, 4


@dataclass(frozen=True)
class Fixes:
    """Which fixes are on. The order of the fields is the order of the fixes."""

    tokens_once: bool = False
    anomaly_off: bool = False
    whole_batch: bool = False
    heads_together: bool = False
    sdpa: bool = False
    rare_metrics: bool = False
    fused_adamw: bool = False


WORDS = {
    "tokens_once": "tokenise once, not for each sample",
    "anomaly_off": "detect_anomaly off",
    "whole_batch": "the whole batch at once",
    "rare_metrics": "metrics: one .item() at the end",
    "heads_together": "all heads in one product",
    "sdpa": "scaled_dot_product_attention",
    "fused_adamw": "AdamW(fused=True)",
}


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Documents:
    """Compressed documents. A sample is a window of one document."""

    def __init__(self, fixes: Fixes) -> None:
        generator = random.Random(0)
        words = ["".join(generator.choices("etaoinshr", k=4)) for _ in range(300)]
        texts = [" ".join(generator.choices(words, k=3000)) for _ in range(8)]
        self.packed = [zlib.compress(text.encode()) for text in texts]
        self.ids = {c: i for i, c in enumerate("etaoinshr ")}
        self.cache = [self.read(i) for i in range(8)] if fixes.tokens_once else None

    def read(self, document: int) -> torch.Tensor:
        text = zlib.decompress(self.packed[document]).decode()
        return torch.tensor([self.ids[c] for c in text])

    def sample(self, document: int, start: int) -> torch.Tensor:
        tokens = self.cache[document] if self.cache else self.read(document)
        return tokens[start : start + S + 1]


class Block(nn.Module):
    def __init__(self, fixes: Fixes) -> None:
        super().__init__()
        self.fixes = fixes
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.mlp = nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))
        self.norms = nn.ModuleList([nn.LayerNorm(H), nn.LayerNorm(H)])

    # --8<-- [start:attention]
    def attention(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        if not self.fixes.heads_together:
            outputs = []
            for q, k, v in zip(
                *(part.split(h // HEADS, -1) for part in self.qkv(x).chunk(3, -1)), strict=True
            ):
                mask = torch.tril(torch.ones(s, s)).bool()
                scores = q @ k.transpose(1, 2) / (h // HEADS) ** 0.5  # [b, s, s]
                outputs.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v)
            return self.out(torch.cat(outputs, -1))
        q, k, v = self.qkv(x).view(b, s, 3, HEADS, h // HEADS).permute(2, 0, 3, 1, 4)
        if self.fixes.sdpa:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = torch.tril(torch.ones(s, s)).bool()
            scores = q @ k.transpose(2, 3) / (h // HEADS) ** 0.5  # [b, a, s, s]
            mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, s, h))

    # --8<-- [end:attention]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


# --8<-- [start:train]
def train(fixes: Fixes, steps: int = STEPS) -> tuple[list[float], float, float]:
    """The losses, the accuracy of the last step, and the shortest CPU time of a step in s."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(10, H), *(Block(fixes) for _ in range(LAYERS)), nn.Linear(H, 10)
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        1e-3,
        fused=fixes.fused_adamw,
        foreach=False if not fixes.fused_adamw else None,
    )
    documents, where = Documents(fixes), random.Random(1)
    losses, times = [], []
    torch.autograd.set_detect_anomaly(not fixes.anomaly_off)
    for _ in range(steps):
        begin = time.process_time()
        windows = [
            documents.sample(where.randrange(8), where.randrange(9000)) for _ in range(B)
        ]
        batches = [torch.stack(windows)] if fixes.whole_batch else [w[None] for w in windows]
        loss_sum, right = torch.zeros(()), torch.zeros((), dtype=torch.long)
        optimizer.zero_grad()
        for batch in batches:  # [b, s + 1]
            logits, targets = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
            loss = F.cross_entropy(logits, targets) / len(batches)
            loss.backward()
            loss_sum += loss.detach()
            if fixes.rare_metrics:
                right += (logits.argmax(-1) == targets).sum()
            else:  # a counter in Python: .item() for every token
                for scores, target in zip(logits, targets, strict=True):
                    right += scores.argmax().item() == target.item()
        optimizer.step()
        losses.append(loss_sum if fixes.rare_metrics else loss_sum.item())
        times.append(time.process_time() - begin)
    torch.autograd.set_detect_anomaly(False)
    return [float(x) for x in losses], right.item() / (B * S), min(times[1:], default=0.0)


# --8<-- [end:train]


def draw(names: list[str], times: list[float]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ladder", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    rows = range(len(names))[::-1]
    axes.barh(rows, [1e3 * t for t in times], color="#0b6e99", height=0.7)
    for row, name, seconds in zip(rows, names, times, strict=True):
        inside = 1e3 * seconds > 60
        x, colour = (1.1, "white") if inside else (1e3 * seconds * 1.06, "#52525b")
        axes.text(x, row, name, va="center", fontsize=11, color=colour)
    ticks = [1, 3, 10, 30, 100, 300]
    axes.set(xscale="log", xlim=(1, 1.1e3 * max(times)), yticks=[])
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("CPU time of a step (ms)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("ladder.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    torch.autograd.set_detect_anomaly(True)
    fixes, names, times, counts = Fixes(), ["as it was found"], [], []
    print("                                      step     this fix    in all   last loss")
    for field in (None, *fields(Fixes)):
        if field is not None:
            fixes = replace(fixes, **{field.name: True})
            names.append(WORDS[field.name])
        losses, accuracy, seconds = train(fixes)
        times.append(seconds)
        if field is None:
            first, first_accuracy = losses, accuracy
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(first), rtol=1e-3, atol=0)
        assert abs(accuracy - first_accuracy) < 0.01
        with Calls() as calls:
            train(fixes, steps=1)
        counts.append(calls.count)
        assert field is None or counts[-1] < counts[-2]  # fewer operators, on any machine
        gain = times[-2] / seconds if field else 1.0
        print(
            f"{names[-1]:35} ≈{1e3 * seconds:5.1f} ms   ≈{gain:.2f} ×   "
            f"≈{times[0] / seconds:.1f} ×   {losses[-1]:.3f}"
        )
    print(f"losses of all {STEPS} steps equal within 0.1 % after every fix")
    assert times[0] > 4 * times[-1]
    # no anomaly detection and no loop over samples: more than all later fixes together
    assert times[1] / times[3] > times[3] / times[-1]
    draw(names, times)


if __name__ == "__main__":
    main()
