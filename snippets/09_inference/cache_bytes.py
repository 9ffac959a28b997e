"""Bytes of the cache per token, from a model's shape: multi-head, grouped, multi-query, latent.

The published figures fall out of the formula. What fits beside the weights follows.
"""

GIB, KIB = 2**30, 2**10


# --8<-- [start:formula]
def per_token(layers: int, kv_heads: int, width: int, bytes_per_value: int = 2) -> int:
    """Keys and values of one token in all layers."""
    return 2 * layers * kv_heads * width * bytes_per_value


def latent(layers: int, rank: int, rotary: int, bytes_per_value: int = 2) -> int:
    """One latent vector and one rotary key per token and layer, for all heads together."""
    return layers * (rank + rotary) * bytes_per_value


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
    assert equal_groups == 2.25  # as the paper on DeepSeek-V2 has it
    print(f"  a grouped cache of that size would have {equal_groups:.2f} heads of 128")

    print("beside Llama 3 8B's 16.1 GB on 80 GB, a tenth kept free:")
    left = 0.9 * 80e9 - 16.1e9
    for name, size in (
        ("grouped", per_token(32, 8, 128)),
        ("all heads", per_token(32, 32, 128)),
        ("grouped, 8 bits", per_token(32, 8, 128, 1)),
    ):
        tokens = int(left // size)
        print(f"  {name:15} {tokens:7} tokens: {tokens // 8192:3} requests of 8,192")


if __name__ == "__main__":
    main()
