"""Seven ways to train the same model: the peak of memory, predicted by algebra and measured.

The model is a chain of linear layers with ReLU, and Adam trains it in fp32. W is the size of
all weights, and X is the size of all activations that the backward pass needs. Each peak is the
peak of the second step, without the inputs. All ways must give the same weights.

Look at the second table. With 16 tokens the peak is in the optimizer, where other things help.
"""

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

TOKENS, H, LAYERS = 1024, 128, 16
X = LAYERS * TOKENS * H * 4  # one output of ReLU for each layer
W = LAYERS * H * H * 4


class Live(TorchDispatchMode):
    """Counts the bytes of live storages that operators made, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.forget, key).atexit = False
        self.peak = max(self.peak, self.now)
        return result

    def forget(self, key: int) -> None:
        size = self.sizes.pop(key)  # first: other threads may free storages too
        self.now -= size


def build(inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = []
    for _ in range(LAYERS):
        linear = nn.Linear(H, H, bias=False)
        blocks.append(nn.Sequential(linear, nn.ReLU(inplace=inplace)))
    return nn.Sequential(*blocks)


def train(
    micro_batches: int = 1,
    to_none: bool = True,
    inplace: bool = False,
    foreach: bool = False,
    in_backward: bool = False,
    segments: int = 0,
    tokens: int = TOKENS,
) -> tuple[int, int, int, torch.Tensor, torch.Tensor]:
    """Train two steps. Return, for the second one, the peak in bytes, the peak of its forward
    pass, and the bytes of the gradients after its backward pass; then all weights, and Adam's
    running means of the gradients.
    """
    inputs = torch.randn(tokens, H, generator=torch.Generator().manual_seed(1))
    with Live() as live:
        live.sizes[inputs.untyped_storage()._cdata] = 0
        model = build(inplace)
        weights = list(model.parameters())
        # --8<-- [start:in_backward]
        if in_backward:  # one optimizer per weight: it steps when the gradient is ready
            adams = {w: torch.optim.Adam([w], lr=1e-3, foreach=False) for w in weights}

            def update(weight: torch.Tensor) -> None:
                adams[weight].step()
                adams[weight].zero_grad()

            for weight in weights:
                weight.register_post_accumulate_grad_hook(update)
        # --8<-- [end:in_backward]
        else:
            adam = torch.optim.Adam(weights, lr=1e-3, foreach=foreach)
        for _ in range(2):
            live.peak = live.now
            if not in_backward:
                adam.zero_grad(set_to_none=to_none)
            for x in inputs.chunk(micro_batches):
                if segments:
                    each = LAYERS // segments
                    for i in range(0, LAYERS, each):
                        x = checkpoint(model[i : i + each], x, use_reentrant=False)
                else:
                    x = model(x)
                forward = live.peak
                loss = (x.sum() - 1) / TOKENS  # this loss saves no tensor
                del x
                loss.backward()
            left = sum(w.grad.nbytes for w in weights if w.grad is not None)
            if not in_backward:
                adam.step()
        peak, of = live.peak, adams if in_backward else dict.fromkeys(weights, adam)
        means = torch.cat([of[w].state[w]["exp_avg"].flatten() for w in weights])
        return peak, forward, left, torch.cat([w.detach().flatten() for w in weights]), means


def main() -> None:
    u = X / LAYERS  # of one layer
    checkpoints = {"segments": 4}
    both = checkpoints | {"micro_batches": 4}
    rows: list[tuple[str, dict, str, float]] = [  # u: the tensor that is being computed
        ("zero_grad(set_to_none=False)", {"to_none": False}, "4W + X", 4 * W + X + u),
        ("as it is", {}, "3W + X", 3 * W + X + u),
        ("ReLU in place", {"inplace": True}, "3W + X", 3 * W + X + u),
        ("Adam in backward", {"in_backward": True}, "3W + X", 3 * W + X + u),
        ("4 segments", checkpoints, "3W + X/4 + X/4", 3 * W + X / 2),
        ("4 micro-batches", {"micro_batches": 4}, "4W + X/4", 4 * W + X / 4 + u / 4),
        ("both", both, "4W + X/16 + X/16", 4 * W + X / 8),
    ]
    print(f"W = {W / 2**20:.1f} MiB, X = {X / 2**20:.1f} MiB, {LAYERS} layers; peak in MiB")
    *_, truth, true_means = train()
    forwards = {}
    for name, options, formula, predicted in rows:
        peak, forwards[name], left, weights, means = train(**options)
        torch.testing.assert_close(weights, truth, rtol=1e-3, atol=1e-5)
        assert (means - true_means).norm() < 1e-3 * true_means.norm(), name  # Adam hides scale
        assert left == (0 if name == "Adam in backward" else W), (name, left)
        assert abs(predicted - peak) < 0.05 * peak, (name, predicted, peak)
        measured = f"≈{peak / 2**20:.1f}"
        print(f"{name:30}{formula:18}{predicted / 2**20:5.1f} {measured:>7}")
    assert forwards["ReLU in place"] <= forwards["as it is"] - u  # but that is not the peak

    few, temporaries = 16, 3 * W / LAYERS  # of Adam: three for the weight that it updates
    x = X * few / TOKENS
    small = [
        ("foreach=True", {"foreach": True}, "5W", 5 * W),  # temporaries for all weights at once
        ("as it is", {}, "4W", 4 * W + temporaries),
        ("Adam in backward", {"in_backward": True}, "3W + X", 3 * W + x + temporaries),
    ]
    print(f"\n{few} tokens, X = {x / 2**20:.1f} MiB; the peak is in the optimizer")
    for name, options, formula, predicted in small:
        peak, forward, *_ = train(tokens=few, **options)
        assert forward < peak and abs(predicted - peak) < 0.03 * peak, (name, predicted, peak)
        measured = f"≈{peak / 2**20:.1f}"
        print(f"{name:30}{formula:18}{predicted / 2**20:5.1f} {measured:>7}")


if __name__ == "__main__":
    main()
