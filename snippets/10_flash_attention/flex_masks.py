"""This program shows which tiles FlexAttention computes in full, masks inside, or skips.

It builds block masks from five short functions. It counts the kinds of blocks in the dense
mask, and the counts must equal those of BlockMask. The outputs must equal those of SDPA with
the dense mask. Look at the columns "sparsity" and "in use". The program draws flex_masks.svg.
"""

import warnings

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

S, BLOCK, WINDOW, PREFIX = 512, 64, 128, 96
LENGTHS = [200, 56, 160, 96]  # documents packed into one row of 512 tokens


# --8<-- [start:masks]
def causal(b, h, q, k):  # batch, head, query and key index: True where the query may look
    return q >= k


def window(b, h, q, k):
    return q - k < WINDOW


def prefix(b, h, q, k):  # the prompt sees all of itself
    return k < PREFIX


document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


def same_document(b, h, q, k):
    return document[q] == document[k]


MASKS = {
    "causal": causal,
    "sliding window": and_masks(causal, window),
    "prefix": or_masks(causal, prefix),
    "documents": same_document,
    "causal documents": and_masks(causal, same_document),
}
# --8<-- [end:masks]


# --8<-- [start:count]
def kinds(dense: torch.Tensor) -> torch.Tensor:
    """Return for each block of the mask [s, s]: 0 nothing, 1 some, 2 everything is allowed."""
    n = dense.shape[0] // BLOCK
    blocks = dense.view(n, BLOCK, n, BLOCK).transpose(1, 2)  # [n, n, BLOCK, BLOCK]
    return blocks.any(-1).any(-1).int() + blocks.all(-1).all(-1).int()


# --8<-- [end:count]


def dense_masks() -> dict[str, torch.Tensor]:
    """Return the same five masks, built without index functions."""
    past = torch.ones(S, S, dtype=torch.bool).tril()
    together = torch.block_diag(*(torch.ones(n, n) for n in LENGTHS)).bool()
    return {
        "causal": past,
        "sliding window": past.triu(1 - WINDOW),
        "prefix": past | (torch.arange(S) < PREFIX),
        "documents": together,
        "causal documents": past & together,
    }


def draw(grids: dict[str, torch.Tensor]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "flex_masks", "font.size": 11}
    figure, axes = plt.subplots(2, 3, figsize=(6.4, 4.9))
    looks = {0: ("none", "#71717a"), 1: ("#c2410c", "#c2410c"), 2: ("#0b6e99", "#0b6e99")}

    def square(axis, x: float, y: float, kind: int) -> None:
        face, edge = looks[kind]
        axis.add_patch(
            plt.Rectangle((x + 0.08, y + 0.08), 0.84, 0.84, fc=face, ec=edge, lw=0.7)
        )

    for axis, (name, grid) in zip(axes.flat, grids.items(), strict=False):
        for i, row in enumerate(grid.tolist()):
            for j, kind in enumerate(row):
                square(axis, j, i, kind)
        axis.set_title(name, fontsize=12, color="#52525b")
        axis.set_xlabel("blocks of keys", color="#52525b")
    for axis in axes[:, 0]:
        axis.set_ylabel("blocks of queries", color="#52525b")
    for row, kind in enumerate((2, 1, 0)):  # the sixth place holds the legend
        square(axes[1, 2], 0.5, 2 + 1.5 * row, kind)
        words = ("skipped", "masked inside", "full")[kind]
        axes[1, 2].text(1.8, 2.5 + 1.5 * row, words, va="center_baseline", color="#52525b")
    for axis in axes.flat:
        axis.set(
            xlim=(0, S // BLOCK), ylim=(S // BLOCK, 0), aspect="equal", xticks=[], yticks=[]
        )
        axis.spines[:].set_visible(False)
    figure.tight_layout(h_pad=1.2)
    figure.savefig("flex_masks.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    q, k, v = (torch.randn(1, 2, S, 16) for _ in range(3))
    print(f"{S} tokens, blocks of {BLOCK}   full  inside  skipped  sparsity  pairs  in use")
    grids = {}
    for name, mask_mod in MASKS.items():
        # --8<-- [start:use]
        block_mask = create_block_mask(mask_mod, None, None, S, S, "cpu", BLOCK_SIZE=BLOCK)
        out = flex_attention(q, k, v, block_mask=block_mask)
        dense = create_mask(mask_mod, None, None, S, S, "cpu")  # [1, 1, s, s]
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=dense)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        # --8<-- [end:use]
        assert torch.equal(dense[0, 0], dense_masks()[name])
        grid = grids[name] = kinds(dense[0, 0])
        skipped, inside, full = ((grid == kind).sum().item() for kind in (0, 1, 2))
        assert block_mask.sparsity() == 100 * skipped / grid.numel()
        assert torch.equal(block_mask.to_dense()[0, 0].bool(), grid > 0)
        assert block_mask.full_kv_num_blocks.sum() == full
        pairs = dense.sum().item()
        used = pairs / ((inside + full) * BLOCK**2)
        print(
            f"{name:27} {full:6} {inside:7} {skipped:8} {block_mask.sparsity():8.1f}%"
            f" {100 * pairs / S**2:5.1f}% {100 * used:6.1f}%"
        )
    n = S // BLOCK
    assert (grids["causal"] > 0).sum() == n * (n + 1) // 2
    assert (grids["sliding window"] > 0).sum(1).max() == WINDOW // BLOCK + 1
    numbers = [x for x in block_mask.as_tuple() if isinstance(x, torch.Tensor)]
    sizes = []
    for tokens in (S, 2 * S):
        mask = create_block_mask(causal, None, None, tokens, tokens, "cpu", BLOCK_SIZE=BLOCK)
        forward, backward = (mask.kv_indices, mask.full_kv_indices), (mask.q_indices,)
        lists = *forward, *backward, mask.full_q_indices
        sizes.append(sum(x.nbytes for x in lists))
        assert sizes[-1] == 4 * 4 * (tokens // BLOCK) ** 2  # four tables of int32
    assert sizes[1] == 4 * sizes[0]
    print(f"the mask itself: dense {dense.nbytes // 1024} KiB, in blocks", end=" ")
    print(f"{sum(x.nbytes for x in numbers) / 1024:.1f} KiB; both grow with the square")
    draw(grids)


if __name__ == "__main__":
    main()
