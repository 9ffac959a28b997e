"""probability tensor contains either `inf`, `nan` or element < 0: four causes.

torch.multinomial refuses a tensor that is no distribution. Each cause is followed by its fix.
"""

import math

import torch


def draw(logits: torch.Tensor) -> str:
    """Sample from softmax(logits): how many tokens can come, or the error's words."""
    p = logits.softmax(-1)
    try:
        torch.multinomial(p, 1)
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"
    return f"a token of {int((p > 0).sum())}"


# --8<-- [start:top_p]
def top_p_wrong(logits: torch.Tensor, p: float) -> torch.Tensor:
    ordered, index = logits.sort(descending=True)
    held = ordered.softmax(-1).cumsum(-1)  # includes the token itself
    drop = torch.empty_like(held, dtype=torch.bool).scatter_(-1, index, held > p)
    return logits.masked_fill(drop, -math.inf)


def top_p(logits: torch.Tensor, p: float) -> torch.Tensor:
    ordered, index = logits.sort(descending=True)
    shares = ordered.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    before = shares.cumsum(-1) - shares  # without it: 0 for the first, which always stays
    drop = (before >= p) & (before > 0)
    drop = torch.empty_like(drop).scatter_(-1, index, drop)
    return logits.masked_fill(drop, -math.inf)


# --8<-- [end:top_p]


def main() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([4.0, 1.0, 0.5, 0.0, -1.0])
    print(f"the most likely token has {logits.softmax(-1)[0]:.2f}")
    banned = torch.full((5,), -math.inf)
    rows = [
        ("top-p 0.8, an empty set", top_p_wrong(logits, 0.8)),
        ("  the token that crosses p stays", top_p(logits, 0.8)),
        ("temperature 0, a division", logits / 0.0),
        ("  argmax in place of it", banned.index_fill(0, logits.argmax(), 0)),
    ]
    # --8<-- [start:half]
    hidden = torch.full((1, 256), 24.0, dtype=torch.float16)
    head = torch.full((256, 5), 12.0, dtype=torch.float16)
    over = (hidden @ head)[0]  # 256 · 24 · 12 = 73,728: beyond fp16
    rows += [
        ("logits of 73,728 in fp16", over),
        ("  the head's product in fp32", (hidden.float() @ head.float())[0]),
    ]
    # --8<-- [end:half]
    rows += [
        ("every token banned by a grammar", banned),
        ("  the end token stays allowed", banned.index_fill(0, torch.tensor(4), 0)),
    ]
    for words, row in rows:
        result = draw(row)
        print(f"{words}:\n    {result}")
        assert result.startswith("RuntimeError") != words.startswith("  "), words
    assert rows[3][1].argmax() == logits.argmax() and rows[-1][1].argmax() == 4
    # every error has the cause that its row names
    empty, divided, large, forbidden = (row for words, row in rows if words[0] != " ")
    assert torch.equal(empty, top_p_wrong(logits, 0.8)) and empty.isneginf().all()
    assert divided.isnan().any() and divided.isposinf().any()  # 0 / 0 and 4 / 0
    assert large.dtype == torch.float16 and large.isposinf().all()
    assert rows[1][1][0] == 4 and rows[5][1].eq(73_728).all() and forbidden.isneginf().all()

    try:  # many draws at once take another path, and say it in other words
        torch.multinomial(over.softmax(-1), 1000, replacement=True)
    except RuntimeError as error:
        print(f"1,000 draws of logits in fp16:\n    RuntimeError: {error}")

    # the same mistake where the set is not empty: no error, and a smaller set than asked for
    flat = torch.tensor([0.5, 0.3, 0.2]).log()
    kept = (top_p_wrong(flat, 0.7) > -math.inf).sum(), (top_p(flat, 0.7) > -math.inf).sum()
    print(f"shares 0.5, 0.3, 0.2 and p = 0.7: {kept[0]} token kept, {kept[1]} should be")
    assert kept == (1, 2)


if __name__ == "__main__":
    main()
