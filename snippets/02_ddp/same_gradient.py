"""The mean of the gradients of equal shards is the gradient of the whole batch.

The loss is a mean over samples, L = 1/B Σ l_i, and its gradient is linear in the l_i. Divide
the batch into N shards with B_1 … B_N samples. Shard r has the mean loss L_r. Then

    ∇L = Σ_r (B_r / B) ∇L_r

With equal shards, every weight B_r / B is 1/N, and the sum is a plain mean. DDP computes this
mean with an all-reduce and a division. With unequal shards, the plain mean is the gradient of a
different loss, in which a sample of a small shard has a larger weight. The same happens if the
loss is a mean over tokens and the ranks have different numbers of tokens.

One process computes everything here, in float64. In the output, look at the two cases in which
the plain mean is wrong: unequal shards, and a loss that is a sum.
"""

import torch
from torch import nn

torch.manual_seed(0)
BATCH = 24
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).double()
inputs = torch.randn(BATCH, 16, dtype=torch.float64)
targets = inputs[:, :4].sum(dim=1, keepdim=True)


def gradient(samples: slice, reduction: str = "mean") -> torch.Tensor:
    """Return the gradient of the loss over `samples` as one flat vector."""
    loss = nn.functional.mse_loss(model(inputs[samples]), targets[samples], reduction=reduction)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])


def shard_gradients(sizes: list[int], reduction: str = "mean") -> torch.Tensor:
    """Return one row per rank: the gradient that a rank with so many samples computes."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    shards = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return torch.stack([gradient(shard, reduction) for shard in shards])  # [N, Ψ]


def distance(ours: torch.Tensor, truth: torch.Tensor) -> str:
    """Return `equal` (up to rounding), or the length of the error relative to `truth`."""
    if torch.allclose(ours, truth):
        return "equal"
    return f"off by {(ours - truth).norm() / truth.norm():.1%}"


def check(whole: torch.Tensor) -> None:
    """Compare the gradient with a difference quotient in a random direction."""
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    step = 1e-5 * torch.randn_like(parameters)
    losses = []
    for point in (parameters - step, parameters + step, parameters):
        nn.utils.vector_to_parameters(point, model.parameters())
        losses.append(((model(inputs) - targets) ** 2).sum().item() / BATCH)
    quotient = torch.tensor((losses[1] - losses[0]) / 2, dtype=torch.float64)
    torch.testing.assert_close(whole @ step, quotient, rtol=1e-4, atol=0)


def main() -> None:
    whole = gradient(slice(0, BATCH))
    check(whole)

    equal = [6, 6, 6, 6]
    plain = shard_gradients(equal).mean(0)
    print(f"shards of {equal}, plain mean: {distance(plain, whole)}")

    unequal = [12, 6, 4, 2]
    rows = shard_gradients(unequal)
    weights = torch.tensor(unequal, dtype=torch.float64) / BATCH  # B_r / B
    print(f"shards of {unequal}, plain mean: {distance(rows.mean(0), whole)}")
    print(f"shards of {unequal}, weighted mean: {distance(weights @ rows, whole)}")

    # With a plain mean, sample i of shard r has the weight 1 / (N B_r) in place of 1 / B.
    samples = shard_gradients([1] * BATCH)
    weights = [1 / (len(unequal) * size) for size in unequal for _ in range(size)]
    weighted = torch.tensor(weights, dtype=torch.float64) @ samples
    torch.testing.assert_close(weighted, rows.mean(0))

    # If the loss is a sum, the gradients must be summed. Their mean is N times too small.
    whole_sum = gradient(slice(0, BATCH), "sum")
    mean_of_sums = shard_gradients(equal, "sum").mean(0)
    torch.testing.assert_close(mean_of_sums * len(equal), whole_sum)
    ratio = whole_sum.norm() / mean_of_sums.norm()
    print(f"loss is a sum, shards of {equal}, plain mean: {ratio:.0f} times too small")


if __name__ == "__main__":
    main()
