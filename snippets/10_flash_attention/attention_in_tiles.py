"""Attention in tiles, one after the other: maximum, sum, output, and the bytes that cross.

One query of the tile at hand is followed. Weights are powers of two, as kernels compute them,
and scores and values are whole numbers: so float64 rounds nothing, and the tiles must end with
exactly the output of the plain softmax. Bytes are those of one head in bf16. The program prints
one step. Without arguments it also checks itself, and draws attention_in_tiles.svg. The page
"Flash attention, tile by tile" has the same numbers.
"""

import argparse
import itertools
import math
import sys
from decimal import ROUND_HALF_UP, Context

ORDERS = ["queries-outside", "keys-outside"]
MASKS = ["none", "causal"]
SCORES = ["random", "rising", "falling", "one-large"]
FIRST = {
    "sequence": 1024, "width": 128, "rows": 128, "columns": 128, "order": "queries-outside",
    "mask": "none", "scores": "random", "query": 0, "step": 13,
}  # fmt: skip
HELP = {
    "sequence": "tokens", "width": "of the head, d", "rows": "queries of a tile",
    "columns": "keys of a tile", "order": "of the loops", "mask": "of the scores",
    "scores": "where the large ones are", "query": "that is followed, in its tile",
    "step": "tiles that are done",
}  # fmt: skip
Settings = dict
Tile = tuple[int, int]  # which rows, which columns


# --8<-- [start:inputs]
def dice(n: int) -> int:
    """32 bits that look random, from a whole number: two rounds of MurmurHash3's last step."""
    for factor in (2246822507, 3266489909):
        n = (n ^ n >> 15) * factor % 2**32
    return n ^ n >> 16


def score(s: Settings, i: int, j: int) -> int:
    """In base 2: zeros at the end of random bits, so k or more with a chance of 2^-k."""
    length = s["sequence"]
    drawn = dice(i * length + j + 1)
    zeros = min(12, (drawn & -drawn).bit_length() - 1) if drawn else 12
    return (
        zeros
        + {
            "random": 0,
            "rising": 16 * j // length,
            "falling": -(16 * j // length),
            "one-large": 16 * (j == 5 * length // 8),
        }[s["scores"]]
    )


def value(j: int) -> int:
    """The first of a key's values, 1 to 9."""
    return 1 + dice(j + 2**31) % 9


# --8<-- [end:inputs]


# --8<-- [start:tiles]
def tiles(s: Settings) -> list[Tile]:
    """Those that are computed, in order: a causal mask leaves out what no query sees."""
    rows = range(-(-s["sequence"] // s["rows"]))
    columns = range(-(-s["sequence"] // s["columns"]))
    if s["order"] == "queries-outside":
        order = [(i, j) for i in rows for j in columns]
    else:
        order = [(i, j) for j in columns for i in rows]
    return [tile for tile in order if kind(s, tile) != "skipped"]


def kind(s: Settings, tile: Tile) -> str:
    """What a mask does to a tile."""
    (first, last), (left, right) = ends(s, tile)
    if s["mask"] == "none" or right <= first:
        return "whole"
    return "cut" if left <= last else "skipped"


def ends(s: Settings, tile: Tile) -> tuple[Tile, Tile]:
    """First and last query, first and last key."""
    (i, j), (r, c), length = tile, (s["rows"], s["columns"]), s["sequence"]
    return (i * r, min(length, i * r + r) - 1), (j * c, min(length, j * c + c) - 1)


# --8<-- [end:tiles]


# --8<-- [start:online]
State = tuple[float, float, float]  # maximum, sum, output not yet divided


def online(s: Settings, state: State, query: int, left: int, right: int) -> tuple[float, State]:
    """One tile for one query: its largest score, and the state after it."""
    end = min(right, query) if s["mask"] == "causal" else right
    z = [score(s, query, j) for j in range(left, end + 1)]
    m_old, total, out = state
    largest = max(z, default=-math.inf)
    m = max(m_old, largest)
    shrink = 2.0 ** (m_old - m)
    p = [2.0 ** (each - m) for each in z]
    total = total * shrink + sum(p)
    out = out * shrink + sum(x * value(left + k) for k, x in enumerate(p))
    return largest, (m, total, out)


def plain(s: Settings, query: int) -> float:
    """The whole row at once."""
    keys = range(query + 1 if s["mask"] == "causal" else s["sequence"])
    m = max(score(s, query, j) for j in keys)
    p = [2.0 ** (score(s, query, j) - m) for j in keys]
    return sum(x * value(j) for x, j in zip(p, keys, strict=True)) / sum(p)


# --8<-- [end:online]


# --8<-- [start:bytes]
def crossed(s: Settings, done: list[Tile]) -> tuple[int, int]:
    """Bytes read and written by these tiles: bf16, and fp32 for what is one number a query."""
    read = written = 0
    last: Tile = (-1, -1)
    computed = tiles(s)
    ends_row = {i: j for i, j in computed if s["order"] == "queries-outside"}
    for i, j in done:
        (first, end), (left, right) = ends(s, (i, j))
        q, k = 2 * s["width"] * (end + 1 - first), 2 * s["width"] * (right + 1 - left)
        numbers = 4 * (end + 1 - first)
        if s["order"] == "queries-outside":
            read += q * (i != last[0]) + 2 * k  # queries stay, keys and values pass
            written += (q + numbers) * (ends_row[i] == j)  # output and log-sum-exp, once
        else:
            before = q + 2 * numbers  # output, maximum and sum so far
            read += 2 * k * (j != last[1]) + q + before * (j > 0)  # keys stay, the others pass
            written += before
        last = (i, j)
    return read, written


def moves(s: Settings, computed: list[Tile], k: int) -> list[list[str]]:
    """The matrices of which the k-th tile reads a part, and those of which it writes one."""
    i, j = computed[k]
    last_i, last_j = computed[k - 1] if k else (-1, -1)
    if s["order"] == "queries-outside":
        ends_row = k + 1 == len(computed) or computed[k + 1][0] != i
        return [["Q"] * (i != last_i) + ["K", "V"], ["O"] * ends_row]
    return [["Q", *("KV" if j != last_j else ""), *("O" if j else "")], ["O"]]


def plain_bytes(s: Settings) -> dict[str, int]:
    """What each operator of plain attention reads and writes, in bf16."""
    n, d = s["sequence"], s["width"]
    mask = {"mask": 2 * n * n} if s["mask"] == "causal" else {}
    elements = {"scale": 2 * n * d, "QKᵀ": 2 * n * d + n * n}
    elements |= mask | {"softmax": 2 * n * n, "PV": n * n + 2 * n * d}
    return {name: 2 * count for name, count in elements.items()}


def on_chip(s: Settings) -> dict[str, int]:
    """Bytes of one tile on the chip: Q, K and V in bf16, and everything else in fp32."""
    r, c, d = s["rows"], s["columns"], s["width"]
    inputs = {"Q": 2 * d * r, "K": 2 * d * c, "V": 2 * d * c}
    return inputs | {"scores": 4 * r * c, "output": 4 * r * d, "maximum and sum": 8 * r}


# --8<-- [end:bytes]


def digits(x: float) -> str:
    """Three significant digits, and all of those before the point."""
    if x >= 1000:
        return str(math.floor(x + 0.5))
    return f"{float(Context(prec=3, rounding=ROUND_HALF_UP).create_decimal(x)):.12g}"


UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def in_bytes(x: float) -> str:
    unit = next((u for u in ("GiB", "MiB", "KiB") if x >= UNITS[u]), None)
    return f"{digits(x / UNITS[unit])} {unit}" if unit else f"{digits(x)} B"


def whole(x: float) -> str:
    """A score, or none: all are whole."""
    return "−∞" if x == -math.inf else str(int(x)).replace("-", "−")


def power(before: float, after: float) -> str:
    """The factor 2^(before - after)."""
    if before in (after, -math.inf):
        return str(int(before == after))
    return "2" + str(int(before - after)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def facts(s: Settings) -> dict:
    """What is said after so many tiles."""
    computed = tiles(s)
    done = computed[: s["step"]]
    i, j = done[-1]
    (first, end), (left, right) = ends(s, (i, j))
    query = min(first + s["query"], end)
    state: State = (-math.inf, 0.0, 0.0)
    history = {}
    for tile in [tile for tile in computed if tile[0] == i]:
        (_, (begin, stop)) = ends(s, tile)
        if tile[1] > j:
            history[f"{begin}–{stop}"] = ["not yet"]
            continue
        before = state[0]
        largest, state = online(s, state, query, begin, stop)
        m, total, out = state
        history[f"{begin}–{stop}"] = [
            whole(largest), whole(m), power(before, m), digits(total), digits(out)
        ]  # fmt: skip
    read, written = crossed(s, done)
    new = [a - b for a, b in zip((read, written), crossed(s, done[:-1]), strict=True)]
    in_all = sum(crossed(s, computed))
    by_plain = sum(plain_bytes(s).values())
    flops = 0
    for tile in computed:
        (a, b), (c, d) = ends(s, tile)
        flops += 4 * (b + 1 - a) * (d + 1 - c) * s["width"]
    side = -(-s["sequence"] // s["rows"]) * -(-s["sequence"] // s["columns"])
    return {
        "tile": f"queries {first}–{end}, keys {left}–{right}",
        "kind": kind(s, (i, j)),
        "done": f"{len(done)} of {len(computed)}",
        "tiles": f"{len(computed)} of {side}",
        "query": str(query),
        "output": digits(state[2] / state[1]),
        "plain output": digits(plain(s, query)),
        "read": in_bytes(read),
        "written": in_bytes(written),
        "this tile": f"{in_bytes(new[0])} read, {in_bytes(new[1])} written",
        "moves": moves(s, computed, s["step"] - 1),
        "bytes": in_bytes(in_all),
        "plain bytes": in_bytes(by_plain),
        "ratio": digits(by_plain / in_all),
        "intensity": digits(flops / in_all),
        "chip": in_bytes(sum(on_chip(s).values())),
        "parts": {name: in_bytes(each) for name, each in on_chip(s).items()},
        "history": history,
        "now": f"{left}–{right}",
    }


def check() -> int:
    """Hold tiles to the plain softmax, torch, the mask and formulas; count the rows."""
    import torch

    rows = 0
    for order, mask, scores in itertools.product(ORDERS, MASKS, SCORES):
        for n, r, c in ((64, 16, 8), (64, 8, 16), (50, 12, 7), (32, 32, 8)):
            s = FIRST | {"sequence": n, "rows": r, "columns": c, "width": 16}
            s |= {"order": order, "mask": mask, "scores": scores}
            every = [(i, j) for i in range(-(-n // r)) for j in range(-(-n // c))]
            for tile in every:
                (first, end), (left, right) = ends(s, tile)
                seen = [
                    mask == "none" or j <= i
                    for i in range(first, end + 1)
                    for j in range(left, right + 1)
                ]
                truth = "whole" if all(seen) else "cut" if any(seen) else "skipped"
                assert kind(s, tile) == truth
            computed = tiles(s)
            assert sorted(computed) == [t for t in every if kind(s, t) != "skipped"]
            z = torch.tensor([[score(s, i, j) for j in range(n)] for i in range(n)])
            z = z.double() * math.log(2)
            if mask == "causal":
                z = z.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
            truth = z.softmax(-1) @ torch.tensor([value(j) for j in range(n)]).double()
            for query in range(n):
                state: State = (-math.inf, 0.0, 0.0)
                for tile in computed:
                    if tile[0] == query // r:
                        _, state = online(s, state, query, *ends(s, tile)[1])
                assert state[2] / state[1] == plain(s, query)  # to the last bit
                assert math.isclose(state[2] / state[1], truth[query], rel_tol=1e-12)
                rows += 1
            for k in range(len(computed)):  # what a tile moves has the bytes that are counted
                (first, last), (left, right) = ends(s, computed[k])
                a, b = 2 * 16 * (last + 1 - first), 2 * 16 * (right + 1 - left)
                numbers = 4 * (last + 1 - first) * (1 if order == ORDERS[0] else 2)
                size = {"Q": a, "K": b, "V": b, "O": a + numbers}
                old, new = (crossed(s, computed[:end]) for end in (k, k + 1))
                for before, after, names in zip(old, new, moves(s, computed, k), strict=True):
                    assert after - before == sum(size[name] for name in names)
            read, written = crossed(s, computed)
            passes, d = -(-n // (r if order == ORDERS[0] else c)), 16
            if mask == "none" and order == ORDERS[0]:
                assert (read, written) == (2 * n * d * (1 + 2 * passes), 2 * n * d + 4 * n)
            elif mask == "none":
                again = (passes - 1) * (2 * n * d + 8 * n)  # output, maximum and sum
                assert read == 2 * n * d * (2 + passes) + again
                assert written == again + 2 * n * d + 8 * n
    return rows


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "tiles", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3))
    s = FIRST | {"sequence": 4096, "columns": 128}
    bars = {"plain, by operator": list(plain_bytes(s).values())}
    for r in (64, 128, 256):
        cut = s | {"rows": r}
        bars[f"tiles of {r} queries"] = [sum(crossed(cut, tiles(cut)))]
    for y, parts in enumerate(bars.values()):
        x = 0.0
        for part in parts:
            colour = "#0b6e99" if len(parts) == 1 else "#c2410c"
            axes.barh(y, part / 2**20, left=x, height=0.6, color=colour, edgecolor="white")
            x += part / 2**20
        axes.text(x + 1, y, f"{x:.0f} MiB", va="center")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set(xlabel="MiB read and written, one head of 4,096 tokens, d = 128, bf16")
    axes.set(xlim=(0, 160))
    axes.spines[["top", "right"]].set_visible(False)
    axes.patch.set_visible(False)
    figure.tight_layout()
    figure.savefig("attention_in_tiles.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    chosen = {"order": ORDERS, "mask": MASKS, "scores": SCORES}
    for name, first in FIRST.items():
        kind_of = {"choices": chosen[name]} if name in chosen else {"type": int}
        parser.add_argument(f"--{name}", default=first, help=HELP[name], **kind_of)
    s = vars(parser.parse_args())
    if not (1 <= s["sequence"] <= 8192 and 1 <= s["width"] <= 512):
        sys.exit("a sequence has 1 to 8192 tokens, and a head a width of 1 to 512")
    if not 1 <= min(s["rows"], s["columns"]) <= max(s["rows"], s["columns"]) <= s["sequence"]:
        sys.exit("a tile has 1 query and key at least, and no more than the sequence")
    if not 0 <= s["query"] < s["rows"]:
        sys.exit("--query counts from 0, within its tile")
    if not 1 <= s["step"] <= (count := len(tiles(s))):
        sys.exit(f"--step: 1 to {count}")
    said = facts(s)
    print(
        f"{said['done']} tiles done; the last: {said['tile']}, {said['kind']}; "
        f"the mask leaves {said['tiles']}"
    )
    print(f"query {said['query']}, tile by tile:")
    print("      keys   its max       max    shrink       sum    output")
    for keys, cells in said["history"].items():
        print(f"{keys:>10}", *(f"{each:>10}" for each in cells), sep="")
    print(f"output, divided: {said['output']}; plain, of all keys: {said['plain output']}")
    print(f"this tile: {said['this tile']}; ", end="")
    print(f"so far: {said['read']} read, {said['written']} written")
    print(
        f"in all: {said['bytes']}; plain: {said['plain bytes']}, {said['ratio']} times as much"
    )
    print(f"{said['intensity']} FLOPs per byte; on the chip: {said['chip']}")
    if len(sys.argv) == 1:
        print(f"{check()} rows end with the plain output, to the last bit; bytes as by formula")
        draw()


if __name__ == "__main__":
    main()
