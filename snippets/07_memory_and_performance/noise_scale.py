"""The gradient noise scale tr(Σ)/|G|², from the norms of two batches of different size.

The estimator is from McCandlish et al. (2018, arXiv 1812.06162), Appendix A.1. A network learns
to continue the Zen of Python letter by letter. Early and late in training, with fixed weights,
the program compares the mean of many estimates with the exact tr(Σ) and |G|², which it computes
from the gradient of every sample. Then it tries steps of several batch sizes.
"""

import codecs
import contextlib
import io

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

CONTEXT, WIDTH, MICRO_BATCH, PARTS = 4, 32, 8, 8  # a step: 8 micro-batches of 8
EARLY, LATE, ESTIMATES = 5, 1000, 250


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """For every position of the poem: the four letters before it [n, 4], and the letter [n]."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    poem = codecs.decode(this.s, "rot13").lower()
    number = {letter: i for i, letter in enumerate(sorted(set(poem)))}
    letters = torch.tensor([number[letter] for letter in poem])
    windows = letters.unfold(0, CONTEXT + 1, 1)
    return windows[:, :-1], windows[:, -1]


# --8<-- [start:estimate]
def estimate(micro_batches: torch.Tensor, b: int) -> tuple[float, float]:
    """tr(Σ) and |G|² from the gradients of n micro-batches of b samples, [n, Ψ].

    The squared norm of the gradient of b samples has the mean |G|² + tr(Σ)/b. The squared norm
    of the gradient of n·b samples has the mean |G|² + tr(Σ)/nb. Solve for the two unknowns.
    """
    large_b = len(micro_batches) * b
    small = micro_batches.square().sum(1).mean().item()
    large = micro_batches.mean(0).square().sum().item()
    trace = (small - large) / (1 / b - 1 / large_b)
    square = (large_b * large - b * small) / (large_b - b)
    return trace, square


# --8<-- [end:estimate]


class Task:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x, self.y = text()
        letters = int(max(self.x.max(), self.y.max())) + 1
        self.model = nn.Sequential(
            nn.Embedding(letters, 8),
            nn.Flatten(),
            nn.Linear(8 * CONTEXT, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, letters),
        )
        self.weights = list(self.model.parameters())

    def gradient(self, rows: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(self.x[rows]), self.y[rows])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.weights)])

    def micro_batches(self) -> torch.Tensor:
        """The gradients of the micro-batches of one step, [8, Ψ]."""
        rows = torch.randint(len(self.y), (PARTS, MICRO_BATCH))
        return torch.stack([self.gradient(part) for part in rows])

    # --8<-- [start:exact]
    def exact(self) -> tuple[float, float]:
        """tr(Σ) and |G|² from the gradients of all n samples, one by one, [n, Ψ]."""

        def loss(weights: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = functional_call(self.model, weights, (x[None],))
            return nn.functional.cross_entropy(logits, y[None])

        weights = {name: w.detach() for name, w in self.model.named_parameters()}
        each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, self.x, self.y)
        rows = torch.cat([g.flatten(1) for g in each.values()], dim=1)
        mean = rows.mean(0)
        return (rows - mean).square().sum(1).mean().item(), mean.square().sum().item()

    # --8<-- [end:exact]

    def full_loss(self) -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(self.model(self.x), self.y).item()

    def move(self, step: torch.Tensor) -> None:
        with torch.no_grad():
            parts = step.split([w.numel() for w in self.weights])
            for weight, part in zip(self.weights, parts, strict=True):
                weight.sub_(part.view_as(weight))

    def gain(self, batch: int, tries: int) -> float:
        """By how much a step with the best rate lowers the loss of the whole text, on average.

        A batch of 0 means the whole text, which gives a gradient without noise.
        """
        start, rates = self.full_loss(), [0.5 * 1.6**i for i in range(7)]
        gains = torch.zeros(len(rates))
        for _ in range(tries):
            rows = torch.randint(len(self.y), (batch,)) if batch else torch.arange(len(self.y))
            gradient = self.gradient(rows)
            for i, rate in enumerate(rates):
                self.move(rate * gradient)
                gains[i] += start - self.full_loss()
                self.move(-rate * gradient)
        return (gains.max() / tries).item()


def check_estimate() -> None:
    """3 micro-batches of 5: compare both estimates with the unbiased variance."""
    rows = torch.randn(3, 7) + 1
    variance, mean = rows.var(0).sum().item(), rows.mean(0).square().sum().item()
    truth = torch.tensor([5 * variance, mean - variance / 3])
    torch.testing.assert_close(torch.tensor(estimate(rows, 5)), truth)


def main() -> None:
    check_estimate()
    torch.set_num_threads(1)
    task, done = Task(), 0
    print(f"{len(task.y)} samples, Ψ = {sum(w.numel() for w in task.weights):,}")
    for name, until in (("early", EARLY), ("late", LATE)):
        for _ in range(done, until):
            task.move(0.5 * task.gradient(torch.randint(len(task.y), (PARTS * MICRO_BATCH,))))
        done = until
        print(f"{name}, after {until} steps: loss ≈{task.full_loss():.2f}")
        pairs = [estimate(task.micro_batches(), MICRO_BATCH) for _ in range(ESTIMATES)]
        columns = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        exact = task.exact()
        for words, values, truth in zip(("tr(Σ)", "|G|²"), columns, exact, strict=True):
            mean, error = values.mean().item(), values.std().item() / ESTIMATES**0.5
            assert abs(mean - truth) < 4 * error, (words, mean, truth, error)
            print(
                f"  {words:6} exact ≈{truth:.4f}, mean of estimates ≈{mean:.4f} ± ≈{error:.4f}"
            )
        traces, squares = columns
        scale, ratio = exact[0] / exact[1], traces.sum() / squares.sum()
        print(f"  tr(Σ)/|G|²: exact ≈{scale:.0f}, of the two means ≈{ratio:.0f}")
        assert 0.5 < ratio / scale < 2, (ratio, scale)
        print(f"  single estimates of |G|² below 0: ≈{(squares < 0).double().mean():.0%}")
        best = task.gain(0, tries=1)
        for factor in (0.25, 1, 4):
            b = round(factor * scale)
            formula, share = 1 / (1 + 1 / factor), task.gain(b, tries=12) / best
            print(f"  gain with a batch of ≈{b}: formula {formula:.0%}, measured ≈{share:.0%}")
            assert abs(share - formula) < 0.3, (b, share, formula)


if __name__ == "__main__":
    main()
