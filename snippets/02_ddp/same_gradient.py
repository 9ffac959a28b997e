"""Data parallelism in one process: the mean of the shards' gradients is the batch's gradient.

The loss is a mean over samples, L = 1/B Σ l_i, and the gradient is linear in it. Cut the batch
into N shards of sizes B_1 … B_N, take the mean loss L_r of each and its gradient:

    ∇L = Σ_r (B_r / B) ∇L_r

With equal shards every weight B_r / B is 1/N and the sum is a plain mean: an all-reduce and a
division, which is all that DDP does. With unequal shards the plain mean is the gradient of a
different loss, in which a sample of a small shard counts for more. The same happens where the
loss is a mean over tokens and the ranks hold different numbers of tokens.
"""

import torch
from torch import nn

torch.manual_seed(0)
BATCH = 24
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).double()
inputs = torch.randn(BATCH, 16, dtype=torch.float64)
targets = inputs[:, :4].sum(dim=1, keepdim=True)


def gradient(samples: slice, reduction: str = "mean") -> torch.Tensor:
    """The gradient of the loss over `samples`, all parameters in one flat vector."""
    loss = nn.functional.mse_loss(model(inputs[samples]), targets[samples], reduction=reduction)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])


def shard_gradients(sizes: list[int], reduction: str = "mean") -> torch.Tensor:
    """One row per rank: the gradient that a rank holding that many samples would compute."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    shards = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return torch.stack([gradient(shard, reduction) for shard in shards])  # [N, Ψ]


def distance(ours: torch.Tensor, truth: torch.Tensor) -> str:
    """Say `equal` up to rounding, or how long the error is beside the true gradient."""
    if torch.allclose(ours, truth):
        return "equal"
    return f"off by {(ours - truth).norm() / truth.norm():.1%}"


def main() -> None:
    whole = gradient(slice(0, BATCH))

    equal = [6, 6, 6, 6]
    plain = shard_gradients(equal).mean(0)
    print(f"shards of {equal}, plain mean: {distance(plain, whole)}")

    unequal = [12, 6, 4, 2]
    rows = shard_gradients(unequal)
    weights = torch.tensor(unequal, dtype=torch.float64) / BATCH  # B_r / B
    print(f"shards of {unequal}, plain mean: {distance(rows.mean(0), whole)}")
    print(f"shards of {unequal}, weighted mean: {distance(weights @ rows, whole)}")

    # A loss that is a sum needs a sum: the mean over ranks is N times too small.
    whole_sum = gradient(slice(0, BATCH), "sum")
    mean_of_sums = shard_gradients(equal, "sum").mean(0)
    torch.testing.assert_close(mean_of_sums * len(equal), whole_sum)
    ratio = whole_sum.norm() / mean_of_sums.norm()
    print(f"loss is a sum, shards of {equal}, plain mean: {ratio:.0f} times too small")


if __name__ == "__main__":
    main()
