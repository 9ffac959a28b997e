"""A lower bound for the time of a token: FLOPs and bytes of Llama 3, and speeds of GPUs.

A step with b sequences multiplies every weight with b tokens, and it reads every weight once.
It also reads b caches, because each sequence has its own. The FLOPs are compared with torch's
counter on a model without memory. Draws decode_bound.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

V = 128_256  # vocabulary
MODELS = {  # hidden, layers, heads, heads of the cache, width of the MLP
    "Llama 3 8B": (4096, 32, 32, 8, 14_336),
    "Llama 3 70B": (8192, 80, 64, 8, 28_672),
}
GPUS = {"A100": (312e12, 2039e9), "H100": (989e12, 3350e9), "B200": (2250e12, 8000e9)}


# --8<-- [start:count]
def matrices(h: int, layers: int, heads: int, kv: int, mlp: int) -> int:
    """Parameters that a token is multiplied with. The embedding is only looked up."""
    attention = 2 * h * h + 2 * h * h * kv // heads  # queries and output, keys and values
    return layers * (attention + 3 * h * mlp) + h * V


def cache_bytes(h: int, layers: int, heads: int, kv: int, _: int) -> int:
    """Keys and values of one token in all layers, two bytes each."""
    return 2 * layers * kv * (h // heads) * 2


def weights(model: tuple) -> int:
    """Bytes of the whole model in memory, with the embedding."""
    return 2 * (matrices(*model) + model[0] * V)


def step(model: tuple, b: int, context: int) -> tuple[float, float]:
    """FLOPs and bytes of one step that adds a token to each of b sequences."""
    h, layers = model[:2]
    flops = b * (2 * matrices(*model) + 4 * layers * h * context)
    read = 2 * matrices(*model) + b * context * cache_bytes(*model)
    return flops, read


def prompt(model: tuple, s: int) -> float:
    """FLOPs of the products of a prompt of s tokens; only the last one needs logits."""
    head = model[0] * V
    return 2 * s * (matrices(*model) - head) + 2 * head


def least(model: tuple, gpu: tuple[float, float], b: int, context: int) -> float:
    flops, read = step(model, b, context)
    return max(flops / gpu[0], read / gpu[1])


# --8<-- [end:count]


def counted(model: tuple, b: int, context: int) -> int:
    """FLOPs of one step by torch's counter. Tensors on the meta device need no memory."""
    h, layers, heads, kv, mlp = model
    x = torch.empty(b, h, device="meta")
    with FlopCounterMode(display=False) as counter:
        for _ in range(layers):
            q = F.linear(x, torch.empty(h, h, device="meta"))
            for _ in "kv":
                F.linear(x, torch.empty(h * kv // heads, h, device="meta"))
            keys = torch.empty(b * heads, context, h // heads, device="meta")
            scores = q.view(b * heads, 1, -1) @ keys.transpose(1, 2)
            x = F.linear((scores @ keys).view(b, h), torch.empty(h, h, device="meta"))
            for _ in ("gate", "up"):
                wide = F.linear(x, torch.empty(mlp, h, device="meta"))
            x = F.linear(wide, torch.empty(h, mlp, device="meta"))
        F.linear(x, torch.empty(V, h, device="meta"))
    return counter.get_total_flops()


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "decode", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.9))
    model, gpu = MODELS["Llama 3 8B"], GPUS["H100"]
    batches = [2 ** (k / 4) for k in range(45)]
    for context, color in ((0, "#0b6e99"), (2048, "#c2410c"), (8192, "#7c3aed")):
        rates = [b / least(model, gpu, b, context) for b in batches]
        axes.loglog(batches, rates, color=color, linewidth=1.8)
        # where 80 GB are full of weights and caches
        full = (80e9 - weights(model)) / max(1, context * cache_bytes(*model))
        if full < batches[-1]:
            axes.plot(full, full / least(model, gpu, full, context), "o", color=color)
    axes.text(4, 2000, "weights alone", color="#0b6e99", ha="center", rotation=35)
    axes.text(340, 18_500, "2,048 cached", color="#c2410c")
    axes.text(340, 1750, "8,192 cached", color="#7c3aed")
    axes.axvline(gpu[0] / gpu[1], color="#52525b", linestyle=":", linewidth=1.2)
    axes.text(gpu[0] / gpu[1] * 0.9, 260, "ridge: 295", color="#52525b", ha="right")
    axes.set(xlabel="sequences in a step", ylabel="tokens/s, at most", ylim=(180, 1.2e5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("decode_bound.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    for name, model in MODELS.items():
        flops, _ = step(model, 3, 1000)
        assert flops == counted(model, 3, 1000), "the formula and torch's counter disagree"
        print(f"{name}: {matrices(*model) / 1e9:.2f}B weights in products, "
              f"{2 * matrices(*model) / 1e9:.1f} GB, cache {cache_bytes(*model) >> 10} KiB "
              f"per token")  # fmt: skip
    assert [cache_bytes(*model) >> 10 for model in MODELS.values()] == [128, 320]  # published
    print("FLOPs of a step: the formula equals torch's counter")

    print("\nLlama 3 8B          ridge   a token alone    2,048 of a prompt   tokens for one")
    model = MODELS["Llama 3 8B"]
    for name, gpu in GPUS.items():
        one = least(model, gpu, 1, 0)
        prefill = prompt(model, 2048) / gpu[0]  # its products; attention is not counted
        head = 2 * 2047 * model[0] * V  # FLOPs of logits that a prompt does not need
        assert prompt(model, 2048) == counted(model, 2048, 0) - head
        print(f"  {name}        {gpu[0] / gpu[1]:9.0f}   {1e3 * one:8.2f} ms   "
              f"{1e3 * prefill:12.1f} ms   {2048 * one / prefill:15.0f}")  # fmt: skip

    print("\nLlama 3 8B on one H100, 2,048 tokens cached each")
    for b in (1, 8, 64, 256):
        flops, read = step(model, b, 2048)
        time = least(model, GPUS["H100"], b, 2048)
        caches = b * 2048 * cache_bytes(*model)
        total = weights(model) + caches
        print(f"  {b:3} sequences: {flops / read:4.1f} FLOPs per byte, {1e3 * time:5.2f} ms, "
              f"{b / time:5.0f} tokens/s, cache {caches / read:3.0%} of the bytes, "
              f"{total / 1e9:.1f} GB{', too many' * (total > 80e9)}")  # fmt: skip
    most = GPUS["H100"][1] / (2048 * cache_bytes(*model))
    print(f"  and never more than W / (context × cache): {most:.0f} tokens/s")
    assert 4096 / least(model, GPUS["H100"], 4096, 2048) < most

    seventy = 2 * matrices(*MODELS["Llama 3 70B"])
    print(f"\nLlama 3 70B over 8 H100, a token alone: {1e3 * seventy / 8 / 3350e9:.2f} ms")
    draw()


if __name__ == "__main__":
    main()
