"""A small indexer chooses the keys of sparse attention; with k = n, the result is exact.

The indexer has its own queries and keys, which are much narrower than those of the attention.
For each query it scores all earlier keys, and the attention then uses only the k best keys. The
program trains an indexer to predict the weights of the attention, as DeepSeek-V3.2 does, and
tests it on other data. It compares the chosen keys with random keys and with the keys that have
the largest mean weights. Then it counts FLOPs and bytes for the sizes of DeepSeek-V3.2. It also
counts the blocks of keys that a block-sparse kernel would have to read for random keys.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

S, HIDDEN, HEADS, D = 192, 32, 4, 16  # tokens, hidden size, heads and their width
INDEX_HEADS, INDEX_D = 2, 8


class Indexer(nn.Module):
    """Scores I[t, s] = sum over heads j of w[t, j] * relu(q[t, j] . k[s])."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(HIDDEN, INDEX_HEADS * INDEX_D, bias=False)
        self.key = nn.Linear(HIDDEN, INDEX_D, bias=False)  # one key for all heads
        self.weight = nn.Linear(HIDDEN, INDEX_HEADS, bias=False)

    # --8<-- [start:score]
    def forward(self, x):
        """x [s, hidden] -> scores [s, s], minus infinity for later keys."""
        q = self.query(x).unflatten(-1, (INDEX_HEADS, INDEX_D))
        scores = torch.einsum("tjd,sd->tjs", q, self.key(x)).relu()
        scores = torch.einsum("tj,tjs->ts", self.weight(x), scores)
        return scores.masked_fill(later(len(x)), -torch.inf)

    # --8<-- [end:score]


def later(s: int) -> torch.Tensor:
    """True where key s comes after query t."""
    return torch.ones(s, s, dtype=torch.bool).triu(1)


# --8<-- [start:sparse]
def sparse_attention(q, k, v, scores, top):
    """Attention of each query to its `top` keys; q, k, v [heads, s, d], scores [s, s]."""
    best = scores.topk(min(top, scores.shape[1]), dim=-1)
    chosen = best.indices  # [s, top]; all heads use the same keys
    keys, values = k[:, chosen], v[:, chosen]  # [heads, s, top, d]
    logits = torch.einsum("htd,htkd->htk", q, keys) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(best.values == -torch.inf, -torch.inf)  # fewer than `top` keys
    return torch.einsum("htk,htkd->htd", logits.softmax(-1), values)


# --8<-- [end:sparse]


def weights(q, k):
    """The weights of dense causal attention, [heads, s, s]."""
    scores = q @ k.mT * D**-0.5
    return scores.masked_fill(later(q.shape[1]), -torch.inf).softmax(-1)


def data(project, topics):
    """Hidden states, each near one of the topics, and queries, keys and values of them."""
    x = topics[torch.randint(len(topics), (S,))] + 0.5 * torch.randn(S, HIDDEN)
    return x, *(p(x).unflatten(-1, (HEADS, D)).transpose(0, 1) for p in project)


# --8<-- [start:train]
def train(indexer, project, topics, steps=100):
    """Train the indexer: the softmax of its scores predicts the mean weights of all heads."""
    optimizer = torch.optim.Adam(indexer.parameters(), lr=2e-2)
    for _ in range(steps):
        x, q, k, _ = data(project, topics)
        target = weights(q, k).mean(0)  # DSA sums over heads and normalises
        predicted = indexer(x).log_softmax(-1).masked_fill(later(S), 0)
        loss = F.kl_div(predicted, target, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# --8<-- [end:train]


def costs(n: int, top: int = 2048) -> list[float]:
    """One new token after n in a layer of DeepSeek-V3.2: FLOPs and bytes, dense and sparse."""
    heads, latent, rope, index_heads, index_d = 128, 512, 64, 64, 128
    per_key = 2 * heads * (latent + rope) + 2 * heads * latent  # scores, then values
    per_index = 2 * index_heads * index_d
    entry, index_entry = 2 * (latent + rope), index_d + 4  # bf16; fp8 and one fp32 scale
    chosen = min(n, top)
    return [
        n * per_key,
        n * per_index + chosen * per_key,
        n * entry,
        n * index_entry + chosen * entry,
    ]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    topics = torch.randn(12, HIDDEN)
    project = [nn.Linear(HIDDEN, HEADS * D, bias=False).requires_grad_(False) for _ in range(3)]
    project[1].weight.copy_(project[0].weight)  # queries find the keys of their own topic
    project[0].weight.mul_(4)
    untrained, indexer = Indexer(), Indexer()
    train(indexer, project, topics)

    with torch.no_grad():
        x, q, k, v = data(project, topics)  # not used in training
        dense = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        everything = sparse_attention(q, k, v, indexer(x), S)
        torch.testing.assert_close(everything, dense)
        heads = indexer.query(x[100]).view(INDEX_HEADS, INDEX_D)  # one query by the formula
        by_head = [(indexer.key(x[:101]) @ head).clamp(min=0) for head in heads]
        by_loop = sum(w * each for w, each in zip(indexer.weight(x[100]), by_head, strict=True))
        torch.testing.assert_close(indexer(x)[100, :101], by_loop)
        truth = weights(q, k)
        random = torch.rand(S, S).masked_fill(later(S), -torch.inf)
        choices = {
            "random keys": random,
            "untrained indexer": untrained(x),
            "trained indexer": indexer(x),
            "best choice": truth.mean(0).masked_fill(later(S), -torch.inf),
        }
        print(f"{S} tokens, {HEADS} heads; k = {S}: equal to dense attention")
        print("k = 32:             weight of the chosen keys   error of the output")
        results = {}
        for name, scores in choices.items():
            chosen = torch.zeros(S, S).scatter_(1, scores.topk(32).indices, 1.0)
            covered = float((truth * chosen).sum(-1)[:, 64:].mean())
            out = sparse_attention(q, k, v, scores, 32)
            error = float((out - dense)[:, 64:].norm() / dense[:, 64:].norm())
            torch.testing.assert_close(out[:, :32], dense[:, :32])  # at most 32 earlier keys
            results[name] = covered, error
            print(f"{name:20}{f'≈{covered:.0%}':>20}{f'≈{error:.0%}':>20}")
        masked = truth.masked_fill(chosen == 0, 0)  # the last choice, with a mask
        by_mask = masked / masked.sum(-1, keepdim=True) @ v
        torch.testing.assert_close(by_mask, out)
    order = [results[name] for name in choices]
    assert order[0][0] < order[2][0] < order[3][0] and order[1][0] < order[2][0]
    assert order[3][1] < order[2][1] < order[0][1] < order[1][1]
    expected = sum(32 / (t + 1) for t in range(64, S)) / (S - 64)  # of keys chosen at random
    assert abs(order[0][0] - expected) < 0.03
    largest = truth.mean(0).topk(32).values.sum(-1)[64:].mean()  # the mean over the heads
    assert abs(order[3][0] - largest) < 1e-5, "no choice of 32 keys has a larger weight"

    print("DeepSeek-V3.2, one layer, one new token: dense over sparse")
    for n in (2048, 8192, 32768, 131072):
        a, b, c, d = costs(n)
        print(
            f"{n:7,} tokens: FLOPs {a / 1e9:5.2f} G / {b / 1e9:4.2f} G = {a / b:4.1f}, ", end=""
        )
        print(f"bytes {c / 1e6:5.1f} MB / {d / 1e6:4.1f} MB = {c / d:3.1f}")
    blocks = (
        torch.randperm(131072)[:2048].div(128, rounding_mode="floor").unique().numel() / 1024
    )
    assert abs(blocks - (1 - (1 - 2048 / 131072) ** 128)) < 0.03
    print(f"2,048 random keys of 131,072 are in {blocks:.0%} of the blocks of 128 keys")
    assert costs(2048)[0] < costs(2048)[1] and costs(4096)[0] > costs(4096)[1]
    cached, index = torch.empty(4096, 576, device="meta"), torch.empty(4096, 128, device="meta")
    q, q_index = torch.empty(128, 576, device="meta"), torch.empty(64, 128, device="meta")
    with FlopCounterMode(display=False) as dense:
        (q @ cached.T).softmax(-1) @ cached[:, :512]  # the values are a part of the entry
    with FlopCounterMode(display=False) as sparse:
        (q_index @ index.T).relu()
        (q @ cached[:2048].T).softmax(-1) @ cached[:2048, :512]
    assert costs(4096)[:2] == [dense.get_total_flops(), sparse.get_total_flops()]


if __name__ == "__main__":
    main()
