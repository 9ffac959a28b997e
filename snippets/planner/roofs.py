"""The roof of a GPU and the book's operations under it: by sizes, model and batch.

An operation of F FLOPs and B bytes takes at least max(F / P, B / W). P and W are those of
hardware.toml, shapes those of models.toml. An element has two bytes and crosses once, but for
plain attention, whose scores cross four times. Without arguments the program also
compares FLOPs with torch's counter and bytes with tensors that are not stored. The page
"Roofline" has the same numbers.
"""

import argparse
import math
import sys
import tomllib
from decimal import ROUND_HALF_UP, Context
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformer import Shape, layer_matrices

HERE = Path(__file__).parent
GPUS = tomllib.loads((HERE / "hardware.toml").read_text("utf-8"))
MODELS = {  # experts are left out: how many are read depends on what the router says
    name: Shape(**values)
    for name, values in tomllib.loads((HERE / "models.toml").read_text("utf-8")).items()
    if "experts" not in values
}
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, None: 1}


# --8<-- [start:points]
def products(s: Shape) -> float:
    """Parameters that a token is multiplied with; the embedding is only looked up."""
    return float(s.layers * layer_matrices(s, 1) + s.hidden * s.vocabulary)


def cache_bytes(s: Shape) -> float:
    """Keys and values of one token in all layers."""
    return 4.0 * s.layers * s.kv_width


def scores(s: Shape, queries: float, keys: float) -> float:
    """FLOPs of attention in all layers: a product with keys, and one with values."""
    return 4.0 * s.layers * s.attention_width * queries * keys


def points(s: Shape, b: int, c: int, m: int, n: int) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of each operation.

    A batch of b sequences with c tokens behind each, and m tokens of width n through a weight.
    """
    d, heads = s.attention_width // s.heads, float(s.heads)
    return {
        "vector add": (1.0 * m * n, 6.0 * m * n),
        "softmax": (5.0 * m * n, 4.0 * m * n),
        "matmul": (2.0 * m * n * n, 2.0 * (m * n + n * n + m * n)),
        "plain attention": (4 * heads * c * c * d, 2 * heads * (4 * c * c + 6 * c * d)),
        "fused attention": (4 * heads * c * c * d, 2 * heads * (4 * c * d)),
        "decode": (
            b * (2 * products(s) + scores(s, 1, c)),
            2 * products(s) + b * c * cache_bytes(s),
        ),
        "prefill": (  # a causal mask needs half of the scores; caches are written
            b * (2 * products(s) * c + scores(s, c, c) / 2),
            2 * products(s) + b * c * cache_bytes(s),
        ),
    }


def least(flops: float, moved: float, gpu: dict) -> float:
    return max(flops / gpu["flops"], moved / gpu["bandwidth"])


# --8<-- [end:points]


def weight_bytes(s: Shape) -> float:
    """Return the bytes of all weights, with an embedding that is not shared."""
    return 2 * (products(s) + (0 if s.tied else s.hidden * s.vocabulary))


def sequences_that_fit(s: Shape, c: int, gpu: dict) -> int:
    """Return how many caches of c tokens the memory of the GPU holds next to the weights."""
    free = gpu["memory_gib"] * UNITS["GiB"] - weight_bytes(s)
    return max(0, math.floor(free / (c * cache_bytes(s))))


def arithmetic_from(s: Shape, c: int, gpu: dict) -> int | None:
    """Return the smallest batch that arithmetic limits in decode, or None if there is none.

    Each sequence adds FLOPs and the bytes of its cache. All sequences share the weights.
    """
    ridge = gpu["flops"] / gpu["bandwidth"]
    gain = (2 * products(s) + scores(s, 1, c)) / ridge - c * cache_bytes(s)
    return math.floor(2 * products(s) / gain) + 1 if gain > 0 else None


def digits(x: float) -> str:
    """Three significant digits, and all of those before the point."""
    if x >= 1000:
        return str(math.floor(x + 0.5))
    return f"{float(Context(prec=3, rounding=ROUND_HALF_UP).create_decimal(x)):.12g}"


def in_bytes(x: float) -> str:
    unit = next((u for u in ("GiB", "MiB", "KiB") if x >= UNITS[u]), None)
    return f"{digits(x / UNITS[unit])} {unit}" if unit else f"{digits(x)} B"


def in_seconds(x: float) -> str:
    unit, scale = next((u for u in (("s", 1), ("ms", 1e3)) if x * u[1] >= 1), ("µs", 1e6))
    return f"{digits(x * scale)} {unit}"


def in_flops(x: float) -> str:
    unit, size = next((u for u in (("T", 1e12), ("G", 1e9)) if x >= u[1]), ("M", 1e6))
    return f"{digits(x / size)} {unit}FLOP"


def facts(gpu: str, model: str, point: str, b: int, c: int, m: int, n: int) -> dict:
    """What is said about one view."""
    device, s = GPUS[gpu], MODELS[model]
    others = {}
    for name, (flops, moved) in points(s, b, c, m, n).items():
        seconds = least(flops, moved, device)
        bound = "compute" if flops / device["flops"] > moved / device["bandwidth"] else "memory"
        rate = digits(flops / seconds / 1e12)
        others[name] = [digits(flops / moved), f"{rate} TFLOP/s", in_seconds(seconds)]
        if name == point:
            share, work, traffic, waits = flops / seconds / device["flops"], flops, moved, bound
    weights, caches = weight_bytes(s), b * c * cache_bytes(s)
    memory = device["memory_gib"] * UNITS["GiB"]
    ceiling = (2 * products(s) + scores(s, 1, c)) / (c * cache_bytes(s))
    first = arithmetic_from(s, c, device)
    return {
        "ridge": digits(device["flops"] / device["bandwidth"]),
        "flops": in_flops(work),
        "bytes": in_bytes(traffic),
        "intensity": others[point][0],
        "bound": waits,
        "least": others[point][2],
        "rate": others[point][1],
        "share": f"{digits(100 * share)}%",
        "tokens": digits(b / least(*points(s, b, c, m, n)["decode"], device)),
        "ceiling": digits(ceiling),
        "crossing": f"{first} or more sequences" if first else "no batch size",
        "held": f"{in_bytes(weights + caches)} of {device['memory_gib']} GiB"
        + ", too much" * (weights + caches > memory),
        "fits": f"{sequences_that_fit(s, c, device)} sequences",
        "others": others,
    }


def counted(s: Shape, b: int, new: int, context: int) -> int:
    """FLOPs of one step by torch's counter, `new` tokens each; nothing is stored."""

    def linear(x: torch.Tensor, width: int) -> torch.Tensor:
        return F.linear(x, torch.empty(width, x.shape[-1], device="meta"))

    x, d = torch.empty(b, new, s.hidden, device="meta"), s.attention_width // s.heads
    with FlopCounterMode(display=False) as counter:
        for _ in range(s.layers):
            q = linear(x, s.attention_width).view(b * s.heads, new, d)
            for _ in "kv":
                linear(x, s.kv_width)
            keys = torch.empty(b * s.heads, context, d, device="meta")
            x = linear((q @ keys.mT @ keys).view(b, new, -1), s.hidden)
            for _ in ("gate", "up"):
                wide = linear(x, s.ffn)
            x = linear(wide, s.hidden)
        linear(x, s.vocabulary)
    return counter.get_total_flops()


def check() -> int:
    """Compare FLOPs with torch's counter and bytes with the tensors that cross."""

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta", dtype=torch.bfloat16)

    compared = 0
    for s in MODELS.values():
        b, c, m, n = 3, 512, 64, 2048
        at = points(s, b, c, m, n)
        d = s.attention_width // s.heads
        assert at["decode"][0] == counted(s, b, 1, c)
        assert at["prefill"][0] + b * scores(s, c, c) / 2 == counted(s, b, c, c)
        x, weight, cache = made(m, n), made(n, n), made(b, c, s.layers, 2, s.kv_heads, d)
        with FlopCounterMode(display=False) as counter:
            y = x @ weight
        assert at["matmul"] == (counter.get_total_flops(), x.nbytes + weight.nbytes + y.nbytes)
        read = 2 * products(s) + cache.nbytes  # the same tensor for both
        assert at["decode"][1] == at["prefill"][1] == read
        q, square = made(s.heads, c, d), made(s.heads, c, c)
        # scaled q written and read, k, v, out; scores and weights written and read
        assert at["plain attention"][1] == 6 * q.nbytes + 4 * square.nbytes
        assert at["fused attention"] == (at["plain attention"][0], 4 * q.nbytes)
        for gpu in GPUS.values():
            ridge = gpu["flops"] / gpu["bandwidth"]
            fits, memory = sequences_that_fit(s, c, gpu), gpu["memory_gib"] * UNITS["GiB"]
            sizes = [weight_bytes(s) + (fits + more) * cache.nbytes / b for more in (0, 1)]
            assert sizes[1] > memory and (sizes[0] <= memory or fits == 0)
            for flops, moved in at.values():
                compared += 1
                roof = min(gpu["flops"], flops / moved * gpu["bandwidth"])
                assert abs(flops / least(flops, moved, gpu) / roof - 1) < 1e-12
            # arithmetic limits decode from the batch `first` on, or memory limits every batch
            for length in (32, c, 8192):
                first = arithmetic_from(s, length, gpu)
                tried = [first - 1, first] if first else [1, 10**6]
                decodes = [points(s, tries, length, m, n)["decode"] for tries in tried]
                above = [flops / moved > ridge for flops, moved in decodes]
                assert above == [False, first is not None]
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(points(MODELS["llama-3-8b"], 1, 1, 1, 1))
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--point", choices=names, default="decode")
    parser.add_argument("--batch", type=int, default=1, help="sequences of decode and prefill")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each")
    parser.add_argument("--tokens", type=int, default=64, help="rows of the matmul")
    parser.add_argument("--width", type=int, default=8192, help="its other two sizes")
    args = parser.parse_args()
    sizes = (args.batch, args.context, args.tokens, args.width)
    if min(sizes) < 1:
        sys.exit("sizes are 1 or more")
    said = facts(args.gpu, args.model, args.point, *sizes)
    print(f"{args.gpu}: ridge at {said['ridge']} FLOP/byte")
    print(f"{args.point}: {said['flops']}, {said['bytes']}, {said['intensity']} FLOP/byte")
    print(f"bound by {said['bound']}, at least {said['least']}, {said['rate']}", end="")
    print(f", {said['share']} of the peak")
    print(f"decode of {args.model}: at most {said['tokens']} tokens/s, and whatever the batch,")
    print(f"{said['ceiling']} FLOP/byte; weights and caches {said['held']}")
    print(f"arithmetic limits decode with {said['crossing']}")
    print(f"the memory is large enough for {said['fits']}")
    print("operation        FLOP/byte       at most   least time")
    for name, (intensity, rate, time) in said["others"].items():
        print(f"{name:15} {intensity:>10} {rate:>13} {time:>12}")
    if len(sys.argv) == 1:
        print(f"{check()} points under roofs; FLOPs are those of torch's counter")


if __name__ == "__main__":
    main()
