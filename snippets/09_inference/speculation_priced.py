"""What does each draft cost for Llama 3 8B on an H100, and up to which batch does it help?

A step takes c0 + c1 T + c2 K seconds: for the weights, T new tokens and K cached tokens. A
round checks n tokens of each sequence, reads the weights of the draft once per pass, and gives
G tokens. Sizes are published shapes, and speeds are from the data sheet. The values of G were
measured by drafts.py; MTP's is the lower end of DeepSeek-V3's report.
"""

from dataclasses import dataclass

BANDWIDTH, FLOPS = 3.35e12, 989e12  # H100 SXM, 16 bits
HIDDEN, LAYERS, WIDE, VOCABULARY = 4096, 32, 14_336, 128_256  # Llama 3 8B
CACHE = 2 * LAYERS * 8 * 128  # values a token, in 8 heads of keys and of values
HEAD = HIDDEN * VOCABULARY
LAYER = int(2.5 * HIDDEN**2) + 3 * HIDDEN * WIDE
TARGET = LAYERS * LAYER + HEAD  # parameters that a token is multiplied with
# Llama 3.2 1B: 16 layers of 2,048, the cache's heads are 8 of 64
SMALL = 16 * (int(2.5 * 2048**2) + 3 * 2048 * 8192) + 2048 * VOCABULARY


# --8<-- [start:model]
@dataclass
class Draft:
    name: str
    passes: int  # one after the other, each reads its weights
    read: float  # parameters that a pass reads
    own: int  # parameters held beside the target
    cache: float  # values a token that it caches itself
    checked: int  # n, tokens of a sequence that the target sees in a step
    tokens: float  # G, tokens a step


def costs(parameters: float, cache: float, cache_bytes: int) -> tuple[float, float, float]:
    """Seconds: of the weights in 16 bits, of a new token, of a token of context."""
    return 2 * parameters / BANDWIDTH, 2 * parameters / FLOPS, cache * cache_bytes / BANDWIDTH


def round_line(draft: Draft, context: int, cache_bytes: int) -> tuple[float, float]:
    """A round takes a + b·slope seconds for b sequences; returns a and slope."""
    fixed, token, read = costs(TARGET, CACHE, cache_bytes)
    d_fixed, d_token, d_read = costs(draft.read, draft.cache, cache_bytes)
    nodes = draft.checked - 1  # what the draft computes, over all its passes
    return (
        fixed + draft.passes * d_fixed,
        token * draft.checked + read * context
        + (nodes * d_token + draft.passes * d_read * context if draft.passes else 0),
    )  # fmt: skip


def speedup(draft: Draft, batch: float, context: int, cache_bytes: int) -> float:
    plain, drafted = (round_line(d, context, cache_bytes) for d in (NONE, draft))
    return draft.tokens * (plain[0] + batch * plain[1]) / (drafted[0] + batch * drafted[1])


def overlapped(draft: Draft, batch: int, context: int) -> float:
    """The speed-up if the longer of arithmetic and reading counts, not their sum; 16 bits."""

    def took(parameters: float, cache: float, tokens: float) -> float:
        fixed, token, read = costs(parameters, cache, 2)
        return max(fixed + batch * context * read, batch * tokens * token)

    nodes = (draft.checked - 1) / max(1, draft.passes)
    drafting = draft.passes * took(draft.read, draft.cache, nodes)
    plain = took(TARGET, CACHE, 1)
    return draft.tokens * plain / (took(TARGET, CACHE, draft.checked) + drafting)


def pays_up_to(draft: Draft, context: int, cache_bytes: int) -> float:
    """The batch at which the speed-up has fallen to 1; infinity if it never does."""
    (a, slope), (d, d_slope) = (round_line(x, context, cache_bytes) for x in (NONE, draft))
    saved, added = draft.tokens * a - d, d_slope - draft.tokens * slope
    if saved <= 0:
        assert added >= 0, "it pays from a batch on, not up to one"
        return 0.0
    return saved / added if added > 0 else float("inf")


def capacity(draft: Draft, context: int, cache_bytes: int) -> int:
    """Sequences that fit beside the weights, a tenth of 80 GB left for the rest."""
    room = 72e9 - 2 * (TARGET + HEAD + draft.own)  # HEAD once more: the input embedding
    return int(room / (context * (CACHE + draft.cache) * cache_bytes))


# --8<-- [end:model]

CHAINED = LAYER + 2 * HIDDEN**2  # a layer, and what joins state and token
MEDUSA = 4 * (HIDDEN**2 + HEAD)
NONE = Draft("no draft", 0, 0, 0, 0, 1, 1.0)
DRAFTS = [
    Draft("n-grams, new text", 0, 0, 0, 0, 5, 1.31),
    Draft("n-grams, an edit", 0, 0, 0, 0, 5, 4.19),
    Draft("1B model", 4, SMALL, SMALL, 2 * 16 * 8 * 64, 5, 2.59),
    Draft("1B model, tree", 4, SMALL, SMALL, 2 * 16 * 8 * 64, 13, 3.53),
    Draft("4 Medusa heads", 1, MEDUSA, MEDUSA, 0, 5, 1.93),
    Draft("4 Medusa heads, tree", 1, MEDUSA, MEDUSA, 0, 13, 2.42),
    Draft("chained head", 4, CHAINED + HEAD, CHAINED, CACHE / LAYERS, 5, 2.67),
    Draft("chained head, tree", 4, CHAINED + HEAD, CHAINED, CACHE / LAYERS, 13, 3.77),
    Draft("MTP of V3's shape", 1, CHAINED + HEAD, CHAINED, CACHE / LAYERS, 2, 1.85),
]


def main() -> None:
    c0, c1, c2 = costs(TARGET, CACHE, 2)
    assert (round(TARGET / 1e9, 2), round(SMALL / 1e9, 2)) == (7.50, 1.24)  # published
    print(f"c0 = {1e3 * c0:.1f} ms, c1 = {1e6 * c1:.0f} µs, c2 = {1e9 * c2:.0f} ns, "
          f"with an 8-bit cache {1e9 * c2 / 2:.0f} ns; each has 500 tokens cached")  # fmt: skip
    print("                               drafting   speed-up at batch   pays up to batch")
    print(
        "draft                  n     G    alone      1    64   256    16 bits   8 bits    fit"
    )
    for draft in DRAFTS:
        alone = round_line(draft, 500, 2)[0] - c0
        gains = [speedup(draft, batch, 500, 2) for batch in (1, 64, 256)]
        limits = [pays_up_to(draft, 500, cache_bytes) for cache_bytes in (2, 1)]
        shown = ["any" if limit == float("inf") else f"{limit:.0f}" for limit in limits]
        print(f"{draft.name:21} {draft.checked:2}  {draft.tokens:.2f} {1e3 * alone:5.2f} ms   "
              f"{gains[0]:.2f}  {gains[1]:.2f}  {gains[2]:.2f} {shown[0]:>9} {shown[1]:>8} "
              f"{capacity(draft, 500, 2):6}")  # fmt: skip
        for limit, cache_bytes in zip(limits, (2, 1), strict=True):  # by trying every batch
            tried = [b for b in range(1, 3000) if speedup(draft, b, 500, cache_bytes) > 1]
            assert len(tried) == int(min(limit, 2999))

    useless = Draft("as large as the target", 4, TARGET, TARGET, CACHE, 5, 3.0)
    assert pays_up_to(useless, 500, 2) == 0 and speedup(useless, 1, 500, 2) < 1

    rates, chain = {}, DRAFTS[-3]
    most = max(b for b in range(1, 3000) if overlapped(chain, b, 500) > 1)
    gain, tree = (overlapped(draft, 64, 500) for draft in DRAFTS[-3:-1])
    print(f"if arithmetic and reading overlap: {chain.name} {gain:.2f} at 64, pays up to "
          f"{most}; its tree {tree:.2f} at 64")  # fmt: skip

    print("2,000 cached, as many sequences as fit")
    print("cache     draft              batch   round     a token   tokens/s")
    for cache_bytes in (2, 1):
        for draft in (NONE, chain, DRAFTS[-1]):
            batch = capacity(draft, 2000, cache_bytes)
            a, slope = round_line(draft, 2000, cache_bytes)
            took = a + batch * slope
            rates[cache_bytes, draft.name] = rate = batch * draft.tokens / took
            each = 1e3 * took / draft.tokens
            print(f"{8 * cache_bytes:2} bits   {draft.name:18} {batch:5}   {1e3 * took:4.1f} ms"
                  f"{each:7.1f} ms    {rate:6.0f}")  # fmt: skip
    plain = rates[2, NONE.name]
    bits, drafted = rates[1, NONE.name] / plain, rates[2, chain.name] / plain
    both = rates[1, chain.name] / plain
    print(f"8 bits alone {bits:.2f} times, the chained head alone {drafted:.2f}, "
          f"both {both:.2f} and not {bits * drafted:.2f}")  # fmt: skip
    assert max(bits, drafted) < both < bits * drafted


if __name__ == "__main__":
    main()
