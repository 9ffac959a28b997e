"""Continuous batching over a cache with slots: each answer equals the answer of a run alone.

Every sequence has one slot of a cache with a fixed number of slots. A step runs one token of
each sequence, and the tokens may be at different positions. When a name ends, the next prompt
gets its slot. The program first trains the model, which writes names of Unicode characters.
Characters are drawn at random. The noise belongs to the request, not to the step. Draws
continuous_batching.svg.
"""

import heapq
import random
import unicodedata

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

SLOTS, CONTEXT = 8, 64


def unicode_names() -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return the alphabet, and the ids of the text to train on and of the text held out.

    The text is the name of every character in Unicode 3.2 that has a name of its own (those of
    ideographs and of Korean syllables follow from a rule), one a line, shuffled.
    """
    names = [unicodedata.ucd_3_2_0.name(chr(code), "") for code in range(0x110000)]
    names = [name for name in names if name and not name.startswith(("CJK", "HANGUL SYLLABLE"))]
    random.Random(0).shuffle(names)
    text = "\n".join(names) + "\n"
    alphabet = "".join(sorted(set(text)))
    ids = torch.tensor([alphabet.index(character) for character in text])
    return alphabet, ids[:-20_800], ids[-20_800:]


# --8<-- [start:model]
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


class TrainedCharModel(nn.Module):
    """ids and positions [b, s] -> logits [b, s, v]; `attends` has one function per layer.

    Without the two it is the model that is trained: whole sequences, causal, no cache.
    """

    def __init__(self, vocabulary: int, hidden=64, heads=4, layers=2, context=CONTEXT) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(CachedBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor, positions=None, attends=None) -> torch.Tensor:
        positions = torch.arange(ids.shape[1]) if positions is None else positions
        attends = [causal] * len(self.blocks) if attends is None else attends
        x = self.token(ids) + self.position(positions)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, attend)
        return self.head(self.norm(x))


# --8<-- [end:model]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention among the new tokens alone, as in training and in the first prefill."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def train(model: nn.Module, ids: torch.Tensor, steps=500, rows=8, context=64, lr=1e-2) -> None:
    """Train on windows cut at random from the text."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(steps):
        starts = torch.randint(len(ids) - context, (rows, 1), generator=generator)
        window = ids[starts + torch.arange(context + 1)]  # [b, s+1]
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


# --8<-- [start:engine]
class Slots:
    """A cache [layers, 2, slots, a, context, h/a]; every slot has its own length."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        hidden, heads = model.token.embedding_dim, model.blocks[0].heads
        self.cache = torch.zeros(len(model.blocks), 2, SLOTS, heads, CONTEXT, hidden // heads)
        self.length = torch.zeros(SLOTS, dtype=torch.long)

    def prefill(self, slot: int, prompt: torch.Tensor) -> torch.Tensor:
        """Run a prompt [s] and keep its keys and values; the logits [v] after it."""

        def attend(layer: int):
            def write_and_mix(q, k, v):
                self.cache[layer, :, slot, :, : len(prompt)] = torch.cat([k, v])
                return causal(q, k, v)

            return write_and_mix

        layers = range(len(self.model.blocks))
        positions = torch.arange(len(prompt))[None]
        logits = self.model(prompt[None], positions, [attend(layer) for layer in layers])
        self.length[slot] = len(prompt)
        return logits[0, -1]

    def step(self, slots: list[int], last: torch.Tensor) -> torch.Tensor:
        """One more token for each of `slots`, whose latest is `last` [b]; logits [b, v]."""
        rows = torch.tensor(slots)
        here = self.length[rows]  # the place of the new key in each row
        width = int(here.max()) + 1
        visible = (torch.arange(width) <= here[:, None])[:, None, None]  # [b, 1, 1, width]

        def attend(layer: int):
            def write_and_mix(q, k, v):
                keys, values = self.cache[layer]
                keys[rows, :, here], values[rows, :, here] = k[:, :, 0], v[:, :, 0]
                return F.scaled_dot_product_attention(
                    q, keys[rows, :, :width], values[rows, :, :width], attn_mask=visible
                )

            return write_and_mix

        layers = range(len(self.model.blocks))
        logits = self.model(last[:, None], here[:, None], [attend(layer) for layer in layers])
        self.length[rows] += 1
        return logits[:, 0]


# --8<-- [end:engine]


# --8<-- [start:loops]
@torch.no_grad()
def serve(model, prompts: list[torch.Tensor], noise: torch.Tensor, stop: int, refill: bool):
    """Answers, and the request in each slot of each step; `refill` fills free slots at once.

    `noise` is [requests, context, v], Gumbel: the largest of logits + noise is a sample.
    """
    engine, answers = Slots(model), [[] for _ in prompts]
    free, running, todo = list(range(SLOTS)), {}, list(range(len(prompts)))
    held: list[dict[int, int]] = []  # for every step, the request of each slot
    while todo or running:
        if refill or not running:  # a static batch starts when the whole batch before has ended
            while todo and free:
                slot, number = free.pop(), todo.pop(0)
                logits = engine.prefill(slot, prompts[number])
                answers[number].append(int((logits + noise[number, 0]).argmax()))
                if answers[number][-1] == stop:  # it ends before its first step
                    free.append(slot)
                else:
                    running[slot] = number
        if not running:
            continue
        slots = list(running)
        last = torch.tensor([answers[running[slot]][-1] for slot in slots])
        luck = torch.stack([noise[n, len(answers[n])] for n in running.values()])
        drawn = (engine.step(slots, last) + luck).argmax(-1).tolist()
        held.append(dict(running))
        for slot, character in zip(slots, drawn, strict=True):
            number = running[slot]
            answers[number].append(character)
            if character == stop or len(prompts[number]) + len(answers[number]) == CONTEXT:
                del running[slot]
                free.append(slot)
    return answers, held


@torch.no_grad()
def check_alone(model, prompt: torch.Tensor, noise: torch.Tensor, answer: list[int]) -> None:
    """Alone and without a cache, the model would write the same answer."""
    ids = torch.cat([prompt, torch.tensor(answer)])[None]
    logits = model(ids)[0, len(prompt) - 1 : -1]
    logits += noise[: len(answer)]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(1), rtol=0, atol=1e-4)  # a tie is no error


# --8<-- [end:loops]


def draw(results: dict[str, list[dict[int, int]]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "slots", "font.size": 12}
    figure, panels = plt.subplots(2, 1, figsize=(7, 4.4), sharex=True)
    colours = ("#0f766e", "#c2410c", "#7c3aed", "#a16207")
    for axes, (words, held) in zip(panels, results.items(), strict=True):
        for slot in range(SLOTS):
            numbers = [now.get(slot) for now in held]
            for number in set(numbers) - {None}:
                first, count = numbers.index(number), numbers.count(number)
                axes.barh(slot, count - 0.6, 0.8, first, color=colours[number % 4])
        axes.set(ylabel="slot", yticks=[0, 7])
        axes.set_title(words, loc="left", fontsize=12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.patch.set_visible(False)
    panels[1].set(xlabel="step")
    figure.tight_layout()
    figure.savefig("continuous_batching.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    alphabet, text, held_out = unicode_names()
    torch.manual_seed(0)
    model = TrainedCharModel(len(alphabet))
    train(model, text, steps=250)

    newline = alphabet.index("\n")
    names = "".join(alphabet[i] for i in held_out).split("\n")[1:]
    dice = random.Random(0)
    starts = [name[: dice.randint(2, 10)] for name in names if len(name) > 10][:48]
    prompts = [torch.tensor([alphabet.index(c) for c in "\n" + start]) for start in starts]

    uniform = torch.rand(len(prompts), CONTEXT, len(alphabet)).clamp_min(1e-9)
    noise = -(-uniform.log()).log()
    results, calls = {}, []
    model.register_forward_hook(lambda *_: calls.append(1))
    for words, refill in (("static", False), ("continuous", True)):
        calls.clear()
        answers, held = serve(model, prompts, noise, newline, refill)
        assert len(calls) == len(prompts) + len(held)  # all slots of a step are one batch
        for prompt, luck, answer in zip(prompts, noise, answers, strict=True):
            check_alone(model, prompt, luck, answer)
            assert newline not in answer[:-1], "a name ends with its first newline"
            assert answer[-1] == newline or len(prompt) + len(answer) == CONTEXT
        steps, rows = len(held), sum(map(len, held))
        results[words] = held
        print(
            f"{words:10} {len(prompts)} prompts in ≈{steps} steps, "
            f"≈{rows / steps:.1f} of {SLOTS} slots filled; each answer as if written alone"
        )
        lengths = [len(answer) - 1 for answer in answers]
        if not refill:
            longest = [max(lengths[i : i + SLOTS]) for i in range(0, len(lengths), SLOTS)]
            assert steps == sum(longest), "a static batch lasts as long as its longest answer"
        else:
            ends = [0] * SLOTS  # each prompt begins where a slot becomes free first
            for length in lengths:
                heapq.heapreplace(ends, ends[0] + length)
            assert steps == max(ends), "a free slot does not wait"
        assert rows == sum(lengths)
    draw(results)
    static, continuous = (len(held) for held in results.values())
    assert continuous < static
    print(f"static takes ≈{static / continuous:.1f} times the steps")


if __name__ == "__main__":
    main()
