"""Shows AWQ's idea: a few input channels matter most, and a larger scale protects them.

After Lin et al., AWQ (2023). In the inputs, 1% of the channels are 30 times as large as the
others, and all weights have the same distribution. First, 1% of the columns remain floats, and
they are chosen in three ways. Then all columns are rounded: each column is multiplied by
(mean |x|)^α before rounding and divided by it afterwards.
"""

import torch

TOKENS, K, N, GROUP, BITS = 1024, 512, 512, 128, 3


def round_to_nearest(w: torch.Tensor) -> torch.Tensor:
    """Round to 2^BITS levels with one scale per output and group of inputs; w [n, k]."""
    grouped = w.unflatten(1, (-1, GROUP))
    top = 2 ** (BITS - 1) - 0.5
    scale = grouped.abs().amax(-1, keepdim=True) / top
    return (((grouped / scale - 0.5).round() + 0.5).clamp(-top, top) * scale).flatten(1)


def main() -> None:
    torch.set_num_threads(1)
    group = torch.randn(GROUP, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    levels = torch.arange(-3.5, 4, dtype=torch.float64) * group.abs().max() / 3.5
    nearest = levels[(group[:, None] - levels).abs().argmin(1)]
    both = round_to_nearest(torch.cat([group, 9 * group])[None])[0]  # each has its own scale
    torch.testing.assert_close(both, torch.cat([nearest, 9 * nearest]))
    torch.manual_seed(0)
    x = torch.randn(TOKENS, K, dtype=torch.float64)
    salient = torch.randperm(K)[: K // 100]
    x[:, salient] *= 30
    x[:, salient] -= x[:, salient].mean(0)  # their size is large, but not their mean
    w = torch.randn(N, K, dtype=torch.float64)

    def error(q: torch.Tensor) -> float:
        return ((x @ (q - w).T).norm() / (x @ w.T).norm()).item()

    print(f"{BITS} bits, groups of {GROUP}")
    # --8<-- [start:keep]
    few = K // 100
    keep = {
        "none": torch.tensor([], dtype=torch.long),
        "at random": torch.randperm(K)[:few],
        "largest weights": w.norm(dim=0).topk(few).indices,
        "largest activations": x.norm(dim=0).topk(few).indices,
    }
    left = {}
    for name, columns in keep.items():
        q = round_to_nearest(w)
        q[:, columns] = w[:, columns]
        left[name] = error(q)
        print(f"floats kept: {name:20} error {left[name]:6.1%}")
    # --8<-- [end:keep]
    assert left["largest activations"] < left["none"] / 2
    assert keep["largest activations"].sort().values.equal(salient.sort().values)
    assert left["largest weights"] > 0.9 * left["none"]
    size = w.square().sum(0)
    assert size[keep["largest weights"]].min() > size.quantile(0.99)
    assert abs(x[:, keep["at random"]].std() - 1) < 0.02  # as large as the other 99%

    # --8<-- [start:search]
    errors = {}
    for tenths in range(0, 11):
        scale = x.abs().mean(0) ** (tenths / 10)
        errors[tenths] = error(round_to_nearest(w * scale) / scale)
    # --8<-- [end:search]
    best = min(errors, key=errors.get)
    for tenths in sorted({0, 2, 4, best, 6, 8, 10}):
        mark = "  <- least" if tenths == best else ""
        print(f"all rounded, α = {tenths / 10:.1f}: error {errors[tenths]:6.1%}{mark}")
    assert errors[best] < 0.6 * errors[0] and 0 < best < 10 and errors[10] > 1

    # one column times s: its error is divided by s, unless it becomes the group's largest
    column = salient[0]
    others = torch.arange(K) // GROUP == column // GROUP
    others[column] = False
    own, rest, layer, leads = {}, {}, {}, {}
    for s in (1, 2, 4, 8, 16):
        scale = torch.ones(K, dtype=torch.float64)
        scale[column] = s
        off = round_to_nearest(w * scale) / scale - w
        own[s], rest[s] = off[:, column].norm().item(), off[:, others].norm().item()
        layer[s] = error(w + off)
        leads[s] = (w * scale)[:, column].abs() > w[:, others].abs().amax(1)
        assert off[leads[s], column].abs().max() < 1e-12  # the largest weight is a level
        if s > 1:
            mine, theirs = own[s] / own[1], rest[s] / rest[1]
            print(f"one column × {s:2}: its error × {mine:.2f}, its group's other columns' "
                  f"× {theirs:.2f}, the layer's {layer[s]:.1%}")  # fmt: skip
    assert 0.4 < own[2] / own[1] < 0.6 and rest[2] < 1.1 * rest[1]
    assert leads[2].double().mean() < 0.2 and leads[16].double().mean() > 0.8
    assert own[16] < own[8] and rest[16] > 2 * rest[8] and layer[16] > layer[8]


if __name__ == "__main__":
    main()
