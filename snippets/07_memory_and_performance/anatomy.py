"""Where the bytes of one training step go: predicted part by part, and measured.

The program follows every storage that an operator returns from its allocation to its end. Each
storage belongs to one of five kinds: parameters, gradients, optimizer state, activations (the
tensors that autograd saved) and temporaries (all other tensors). The program shows the second
step, because Adam allocates its moments at the end of the first one. It draws anatomy.svg.

Look at the row "peak": the formula and the measured bytes agree within 1%.
"""

import weakref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

S, B, H, A, LAYERS, VOCABULARY = 128, 4, 128, 4, 3, 512
KINDS = ("parameters", "optimizer state", "gradients", "activations", "temporaries")


class Layer(nn.Module):
    """A pre-norm transformer layer, attention written out, without dropout."""

    def __init__(self, h: int, a: int) -> None:
        super().__init__()
        self.a = a
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.a, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(2, 3) / (h // self.a) ** 0.5  # [b, a, s, s]
        mixed = scores.softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def check_layer(layer: nn.Module, a: int, x: torch.Tensor, *more: object) -> None:
    """Compare with torch's layer on x [b, s, h]. The weights of its norms come last."""
    h = x.shape[-1]
    library = nn.TransformerEncoderLayer(
        h, a, 4 * h, 0, "gelu", batch_first=True, norm_first=True
    )
    weights = list(layer.parameters())
    for theirs, ours in zip(library.parameters(), weights[4:] + weights[:4], strict=True):
        theirs.data.copy_(ours)
    torch.testing.assert_close(layer(x, *more), library(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, H)
        self.layers = nn.Sequential(*(Layer(H, A) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(H), nn.Linear(H, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embed(tokens))))


class Ledger(TorchDispatchMode):
    """Allocations and frees as pairs (storage number, bytes); bytes are negative for a free."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.number: dict[int, int] = {}  # address of a live storage: its number
        self.kind: dict[int, str] = {}  # by storage number; a number that is missing: temporary
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.record(tensor.untyped_storage())
        return result

    def record(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.number:
            return
        number = self.number[key] = self.count
        self.count += 1
        self.events.append((number, size))

        def freed() -> None:
            del self.number[key]
            self.events.append((number, -size))

        weakref.finalize(storage, freed).atexit = False

    def assign(self, tensors: list[torch.Tensor], kind: str) -> None:
        for tensor in tensors:
            self.kind.setdefault(self.number[tensor.untyped_storage()._cdata], kind)

    def timeline(self) -> list[dict[str, int]]:
        """Live bytes of each kind after every event."""
        live, lines = dict.fromkeys(KINDS, 0), []
        for number, size in self.events:
            live[self.kind.get(number, "temporaries")] += size
            lines.append(dict(live))
        return lines


def train(device: torch.device) -> tuple[list[dict[str, int]], dict[str, int], int]:
    """Train two steps. Return the timeline, where the phases of step 2 end, and Ψ."""
    torch.manual_seed(0)
    text = torch.randint(VOCABULARY, (B, S + 1), device=device)
    tokens, targets = text[:, :-1], text[:, 1:]
    assert torch.equal(targets[:, :-1], tokens[:, 1:])  # the target of a token is the next one
    marks = {}
    with Ledger() as ledger, torch.device(device):
        model = Model()
        adam = torch.optim.Adam(model.parameters(), foreach=False)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            ledger.record(tensor.untyped_storage())
            ledger.assign([tensor], "activations")
            return tensor

        parameters = list(model.parameters())
        ledger.assign(parameters, "parameters")
        for _ in range(2):
            marks["start"] = len(ledger.events)
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            marks["forward"] = len(ledger.events)
            loss.backward()
            ledger.assign([p.grad for p in parameters], "gradients")
            marks["backward"] = len(ledger.events)
            adam.step()
            ledger.assign(
                tree_leaves([list(adam.state[p].values()) for p in parameters]), KINDS[1]
            )
            marks["optimizer"] = len(ledger.events)
            adam.zero_grad()
        return ledger.timeline(), marks, sum(p.numel() for p in parameters)


def predict(psi: int) -> dict[str, int]:
    """Bytes of each part by formula, everything in fp32."""
    layer = 4 * (16 * S * B * H + A * S * S * B)  # 64sbh + 4as²b
    ends = 4 * (2 * S * B * H + S * B * VOCABULARY)  # final norm, head, log-softmax
    return {
        "parameters": 4 * psi,
        "optimizer state": 8 * psi,
        "gradients": 4 * psi,
        "activations": LAYERS * layer + ends,
        "temporaries": 2 * 4 * S * B * VOCABULARY,  # gradients of log-softmax and of logits
    }


def draw(lines: list[dict[str, int]], marks: dict[str, int]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "anatomy", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    start = marks["start"]
    colours = ("#52525b", "#7c3aed", "#15803d", "#0b6e99", "#c2410c")
    x = range(len(lines) - start)
    stack = [[line[kind] / 2**20 for line in lines[start:]] for kind in KINDS]
    axes.stackplot(x, stack, colors=colours, alpha=0.75, linewidth=0, step="post")
    ends = [0, *(marks[name] - start for name in ("forward", "backward", "optimizer"))]
    for name, left, right in zip(("forward", "backward", "Adam"), ends, ends[1:], strict=False):
        axes.text((left + right) / 2, 31.5, name, ha="center")
        axes.axvline(right, color="#52525b", linewidth=0.7, linestyle=":")
    for words, where in (
        ("parameters 4Ψ", (8, 1.1)),
        ("optimizer state 8Ψ", (8, 5)),
        ("activations", (ends[1] * 0.62, 11.2)),
        ("gradients 4Ψ", (ends[2] + 12, 10.1)),
    ):
        axes.text(*where, words, color="white", va="center")
    axes.annotate(
        "temporaries",
        (ends[1] + 6, 27.5),
        (ends[1] + (ends[2] - ends[1]) * 0.35, 26.5),
        color="#c2410c",
        arrowprops={"arrowstyle": "-", "color": "#c2410c"},
    )
    axes.set(xlabel="allocations and frees of one step", ylabel="live MiB", ylim=(0, 34))
    axes.set_xlim(0, len(x))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("anatomy.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    check_layer(Layer(16, 4), 4, torch.randn(2, 5, 16))
    lines, marks, psi = train(device)
    step = lines[marks["start"] :]
    peak = max(step, key=lambda line: sum(line.values()))
    measured = {kind: peak[kind] for kind in KINDS}
    measured["gradients"] = max(line["gradients"] for line in step)
    predicted = predict(psi)
    print(f"Ψ = {psi:,}, s = {S}, b = {B}, h = {H}, a = {A}, {LAYERS} layers; MiB")
    print("                   predicted   measured")
    for kind in KINDS:
        ours, seen = predicted[kind], measured[kind]
        assert abs(ours - seen) < 0.01 * seen, (kind, ours, seen)
        print(f"{kind:17}{ours / 2**20:11.2f}   {'≈' + format(seen / 2**20, '.2f'):>8}")
    total = sum(predicted.values()) - predicted["gradients"]  # at the peak there is none yet
    seen = sum(peak.values())
    assert abs(total - seen) < 0.01 * seen, (total, seen)
    statistics = 4 * 2 * S * B * (2 * LAYERS + 1)  # mean and deviation in each norm
    assert statistics < seen - total < 2 * statistics  # most of what the formula leaves out
    print(f"{'peak':17}{total / 2**20:11.2f}   {'≈' + format(seen / 2**20, '.2f'):>8}")
    index = step.index(peak) + marks["start"]
    phase = next(p for p in ("forward", "backward", "optimizer") if index < marks[p])
    assert phase == "backward" and peak["gradients"] == 0
    print(f"the peak lies in {phase}; gradients there: {peak['gradients']} bytes")
    assert lines[marks["backward"] - 1]["activations"] < 1e-3 * measured["activations"]
    between = sum(lines[marks["start"] - 1].values())
    assert 12 <= between / psi < 12.1  # parameters and Adam's two moments, and the tokens
    print(f"between steps: {between / psi:.2f} bytes per parameter")
    draw(lines, marks)


if __name__ == "__main__":
    main()
