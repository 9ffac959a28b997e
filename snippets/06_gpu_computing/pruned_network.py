"""Prune a trained network, train it again with the mask, and run it from the format CSR.

Setting the smallest weights to zero lowers the accuracy, and more training with the mask raises
it again. Without the mask the optimizer changes the zeros, and the network is dense again. Look
at the column "weights": the accuracy does not show this mistake. The network in CSR gives the
same outputs as the masked network.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import nn


def data(n: int, teacher: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 32)
    with torch.no_grad():
        return x, teacher(x).argmax(-1)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
    )


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model if isinstance(module, nn.Linear)]


def by_size(model: nn.Module, density: float) -> list[torch.Tensor]:
    """Return a mask for each layer: the fraction `density` of its largest weights."""
    masks = []
    for layer in linears(model):
        size = layer.weight.detach().abs()
        keep = round(size.numel() * density)
        masks.append(size >= size.flatten().topk(keep).values[-1])
    return masks


def two_of_four(model: nn.Module) -> list[torch.Tensor]:
    """Return a mask for each layer: the two largest of every four neighbours in a row."""
    masks = []
    for layer in linears(model):
        groups = layer.weight.detach().abs().view(layer.out_features, -1, 4)
        places = groups.topk(2, -1).indices
        masks.append(
            torch.zeros_like(groups, dtype=torch.bool).scatter(-1, places, True).flatten(1)
        )
    return masks


@torch.no_grad()
def apply(model: nn.Module, masks: list[torch.Tensor]) -> None:
    for layer, mask in zip(linears(model), masks, strict=True):
        layer.weight.mul_(mask)


def train(model, optimizer, x, y, steps: int, masks=None) -> None:
    for step in range(steps):
        batch = slice(step * 128 % len(x), step * 128 % len(x) + 128)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if masks is not None:
            apply(model, masks)  # a masked gradient alone does not stop momentum


def density(model: nn.Module) -> float:
    weights = torch.cat([layer.weight.flatten() for layer in linears(model)])
    return weights.count_nonzero().item() / weights.numel()


def zeros_remain(model: nn.Module, masks: list[torch.Tensor]) -> bool:
    pairs = zip(linears(model), masks, strict=True)
    return not any(layer.weight[~mask].any() for layer, mask in pairs)


class Sparse(nn.Module):
    """A linear layer in CSR. The sparse matrix is the left factor, so x is transposed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight.detach().to_sparse_csr(), layer.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight @ x.T).T + self.bias  # [out, in] · [in, b] -> [b, out]


def main() -> None:
    warnings.filterwarnings("ignore", message="Sparse")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    teacher = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
    x, y = data(4096, teacher)
    test_x, test_y = data(2048, teacher)

    def accuracy(model: nn.Module, x=test_x, y=test_y) -> float:
        with torch.no_grad():
            return 100 * (model(x).argmax(-1) == y).float().mean().item()

    def report(what: str, model: nn.Module) -> None:
        print(f"{what:36} ≈{100 * density(model):.0f} %   ≈{accuracy(model):.0f} %")

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)  # its momentum survives the pruning
    train(model, optimizer, x, y, 250)
    trained = {k: v.clone() for k, v in model.state_dict().items()}
    print(f"{'':36} weights   right")
    report("trained", model)
    before = accuracy(model)
    assert before < accuracy(model, x, y)  # the first accuracy is of new data
    both = zip(linears(model), by_size(model, 0.1), two_of_four(model), strict=True)
    for layer, tenth, half in both:
        size = layer.weight.detach().abs()
        assert size[tenth].min() > size[~tenth].max()  # the largest of all
        fours, two = size.view(-1, 4), size[half].view(-1, 2)  # and of each four
        assert torch.equal(two.sum(1), fours.sort().values[:, 2:].sum(1))
    seen: list[bool] = []  # are the pruned weights zero when a step begins?
    model.register_forward_pre_hook(lambda *_: seen.append(zeros_remain(model, masks)))
    for name, masks in {"a tenth": by_size(model, 0.1), "2:4": two_of_four(model)}.items():
        model.load_state_dict(trained)
        apply(model, masks)
        report(f"pruned to {name}", model)
        pruned = accuracy(model)
        kept = 0.1 if name == "a tenth" else 0.5
        assert abs(density(model) - kept) < 1e-3 and (before - pruned > 10) == (kept < 0.5)
        if name == "a tenth":
            seen.clear()
            train(model, optimizer, x, y, 100)
            assert seen == [True] + [False] * 99, "the first step changes the zeros"
            report("  tuned, the mask forgotten", model)
            assert density(model) > 0.5 and accuracy(model) > before - 5
            model.load_state_dict(trained)
            apply(model, masks)
        seen.clear()
        train(model, optimizer, x, y, 100, masks)
        assert seen == [True] * 100 and zeros_remain(model, masks)
        report("  tuned, the mask applied each step", model)
        assert accuracy(model) > max(pruned, before - 5)
        if name == "a tenth":
            dense = sum(p.nbytes for p in model.parameters())
            sparse = nn.Sequential(
                *(Sparse(m) if isinstance(m, nn.Linear) else m for m in model)
            )
            torch.testing.assert_close(sparse(test_x), model(test_x), rtol=1e-4, atol=1e-4)
            poisoned = test_x.clone()
            poisoned[:, 0] = torch.nan  # a dense product would multiply zeros by NaN
            assert sparse[0](poisoned).isnan().any(0).equal(model[0].weight[:, 0] != 0)
            parts = [
                t.nbytes
                for m in sparse
                if isinstance(m, Sparse)
                for t in (
                    m.weight.crow_indices(),
                    m.weight.col_indices(),
                    m.weight.values(),
                    m.bias,
                )
            ]
            print(f"  from CSR: equal outputs, {sum(parts):,} of {dense:,} bytes")


if __name__ == "__main__":
    main()
