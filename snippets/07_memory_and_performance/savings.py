"""Ways to spend or save memory that change no result: the peak predicted, and measured.

A chain of linear layers with ReLU, trained by Adam in fp32. W is the bytes of all weights, X of
all activations that backward needs. Peaks are of the second step, without the inputs.
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
    """Bytes of live storages that operators made, and their peak."""

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
        size = self.sizes.pop(key)  # before now is read: buffers may be freed by other threads
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
) -> tuple[int, int, int, torch.Tensor, torch.Tensor]:
    """Peak bytes of the second of two steps, and of its forward; the gradients' bytes behind
    its backward; the weights after it, and Adam's means of gradients.
    """
    inputs = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(1))
    with Live() as live:
        live.sizes[inputs.untyped_storage()._cdata] = 0
        model = build(inplace)
        weights = list(model.parameters())
        # --8<-- [start:in_backward]
        if in_backward:  # an optimizer for each weight, which steps as soon as it can
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
                loss = (x.sum() - 1) / TOKENS  # a loss that keeps nothing of its own
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
    rows: list[tuple[str, dict, str, float]] = [  # what is at the peak, with tensors in flight
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


if __name__ == "__main__":
    main()
