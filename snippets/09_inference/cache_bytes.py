"""Bytes of the cache, from the shape of a model: multi-head, grouped, latent, windows.

The formulas give the published numbers. The program also prints how many requests fit next to
the weights, and what windows and shared layers save with 131,072 tokens.
"""

GIB, KIB = 2**30, 2**10


# --8<-- [start:formula]
def per_token(layers: int, kv_heads: int, width: int, bytes_per_value: int = 2) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return 2 * layers * kv_heads * width * bytes_per_value


def latent(layers: int, rank: int, rotary: int, bytes_per_value: int = 2) -> int:
    """One latent vector and one rotary key per token and layer, for all heads together."""
    return layers * (rank + rotary) * bytes_per_value


def hybrid(tokens: int, full: int, local: int, window: int, kv_heads: int, width: int) -> int:
    """Bytes of a sequence: `full` layers keep all tokens, `local` layers keep a window."""
    kept = full * tokens + local * min(tokens, window)
    return kept * per_token(1, kv_heads, width)


# --8<-- [end:formula]


def main() -> None:
    models = {  # layers, heads that are cached, width of a head
        "Llama 2 7B, 32 heads": (32, 32, 128),
        "Llama 3 8B, 8 of 32": (32, 8, 128),
        "Llama 3 70B, 8 of 64": (80, 8, 128),
    }
    published = {"Llama 2 7B": 512, "Llama 3 8B": 128, "Llama 3 70B": 320}  # KiB
    print("                         per token   8,192 tokens   as one head")
    for name, shape in models.items():
        size = per_token(*shape)
        assert size == published[name.split(",")[0]] * KIB
        one = per_token(shape[0], 1, shape[2])
        print(f"{name:24} {size / KIB:5.0f} KiB   {size * 8192 / GIB:8.2f} GiB   "
              f"{one / KIB:7.0f} KiB")  # fmt: skip
    shape = (61, 512, 64)  # DeepSeek-V3: layers, rank, rotary
    size, heads = latent(*shape), 61 * 128 * ((128 + 64) + 128) * 2
    print(f"{'DeepSeek-V3, latent':24} {size / KIB:5.1f} KiB   {size * 8192 / GIB:8.2f} GiB")
    print(f"  with its 128 heads of keys (192) and values (128) cached: {heads / KIB:.0f} KiB, "
          f"{heads / size:.0f} times as much")  # fmt: skip
    equal_groups = size / per_token(61, 1, 128)
    assert equal_groups == 2.25  # as in the paper on DeepSeek-V2
    print(f"  a grouped cache of that size would have {equal_groups:.2f} heads of 128")

    print("beside Llama 3 8B's 16.1 GB on 80 GB, a tenth of them free for the rest:")
    left = 0.9 * 80e9 - 16.1e9
    for name, size in (
        ("grouped", per_token(32, 8, 128)),
        ("all heads", per_token(32, 32, 128)),
        ("grouped, 8 bits", per_token(32, 8, 128, 1)),
    ):
        tokens = int(left // size)
        print(f"  {name:15} {tokens:7} tokens: {tokens // 8192:3} requests of 8,192")

    print("131,072 tokens, if some layers keep only a window or no cache at all:")
    for name, layers, full, local, window, kv_heads, width in (  # defaults of Transformers 5.23
        ("gpt-oss", 36, 18, 18, 128, 8, 64),
        ("Gemma 3", 26, 4, 22, 4096, 4, 256),
        ("Gemma 3n", 35, 4, 16, 512, 2, 256),  # 15 of the 35 layers read the cache of another
    ):
        size = hybrid(131_072, full, local, window, kv_heads, width)
        every = 131_072 * per_token(layers, kv_heads, width)
        assert size == sum(  # the same, layer by layer and token by token
            2 * kv_heads * width * 2 * min(131_072, kept)
            for kept in [131_072] * full + [window] * local
        )
        print(f"  {name:9} {size / GIB:5.2f} GiB, {every / GIB:5.2f} GiB with all layers full")
        assert size < every


if __name__ == "__main__":
    main()
