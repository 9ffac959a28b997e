"""Error feedback adds the rounding error of this gradient to the next gradient.

Each rank sends one bit per number and a scale (1-bit SGD, Seide et al., 2014). At the optimum,
the gradients of the ranks cancel, but their signs do not. Without error feedback, training
therefore stops far from the optimum. With it, the sum of all sent gradients is nearly the sum
of all true gradients. Compare the distances to the solution.
"""

import os
import sys

import torch
import torch.distributed as dist

H, SAMPLES, STEPS, LR = 64, 256, 200, 0.15


# --8<-- [start:compress]
def one_bit(x: torch.Tensor) -> torch.Tensor:
    """The sign of each number times the mean magnitude, which needs Ψ bits and 4 bytes."""
    return torch.where(x < 0, -1.0, 1.0) * x.abs().mean()


class Compressed:
    """Average gradients over all ranks. Each rank sends one bit per number."""

    def __init__(self, feedback: bool) -> None:
        self.feedback, self.error = feedback, torch.zeros(())

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        corrected = gradient + self.error
        sent = one_bit(corrected)  # floats here; a real implementation would send the bits
        if self.feedback:
            self.error = corrected - sent
        dist.all_reduce(sent)
        return sent / dist.get_world_size()


# --8<-- [end:compress]


def exact(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("start with torchrun: torchrun --nproc-per-node=4 error_feedback.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()

    common = torch.Generator().manual_seed(0)
    truth = torch.randn(H, generator=common)
    own = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(SAMPLES, H, generator=own)
    y = x @ (truth + torch.randn(H, generator=own))  # every rank's data has its own slope

    # with error feedback, the sent gradients add up to the true sum minus the last error
    compressed = Compressed(feedback=True)
    gradients = [x.T @ (x @ torch.full((H,), float(i)) - y) / SAMPLES for i in range(3)]
    sent = sum(compressed(gradient) for gradient in gradients)
    torch.testing.assert_close(sent + exact(compressed.error), exact(sum(gradients)))
    # no other scale has a smaller error: the rest is orthogonal to the signs
    left = gradients[0] - one_bit(gradients[0])
    assert abs(left @ gradients[0].sign()) < 1e-4 * gradients[0].abs().sum()

    distance = {}
    # the best weight for all ranks together, from the normal equations
    xx, xy = exact(x.T @ x), exact(x.T @ y)
    best = torch.linalg.solve(xx, xy)
    ways = {
        "fp32": exact,
        "one bit": Compressed(feedback=False),
        "one bit, error feedback": Compressed(feedback=True),
    }
    for name, average in ways.items():
        w = torch.zeros(H)
        for step in range(STEPS):
            w -= LR * (1 - step / STEPS) * average(x.T @ (x @ w - y) / SAMPLES)
        distance[name] = ((w - best).norm() / best.norm()).item()
    if rank == 0:
        print(f"{n} rank{'s' * (n > 1)}, distance to the solution after {STEPS} steps, "
              "the start's being 1")  # fmt: skip
        for name, far in distance.items():
            print(f"  {name:24} ≈{far:.4f}")
        assert distance["fp32"] < 0.01
        if n > 1:
            assert distance["one bit, error feedback"] < distance["one bit"] / 10
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
