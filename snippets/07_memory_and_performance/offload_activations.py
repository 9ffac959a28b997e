"""Offload of activations by two hooks: pack copies a tensor away, unpack copies it back.

On a machine without an accelerator, files on disk take the place of host memory. The program
counts the bytes that remain on the device between forward and backward, and compares the
gradients. The hooks do not copy the weights.
"""

import tempfile
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TOKENS, H, LAYERS = 512, 64, 8


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


class Offload(saved_tensors_hooks):
    """Writes the tensors that autograd saves into files, except weights and small tensors."""

    def __init__(self, model: nn.Module, folder: Path, at_least: int) -> None:
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.written = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[Path, torch.device]:
            if tensor.untyped_storage().data_ptr() in weights or tensor.nbytes < at_least:
                return tensor
            path = folder / f"{self.written}.pt"
            # clone, because torch.save writes the whole storage of a view
            torch.save(tensor.detach().cpu().clone(), path)
            self.written += 1
            return path, tensor.device

        def unpack(packed: torch.Tensor | tuple[Path, torch.device]) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            path, device = packed
            return torch.load(path, weights_only=True).to(device)

        super().__init__(pack, unpack)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, h]
        return x + self.down(nn.functional.gelu(self.up(x)))


def step(kind: str) -> tuple[int, torch.Tensor, int]:
    """Bytes on the device between forward and backward, the gradient, tensors packed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    x = torch.randn(TOKENS, H, requires_grad=True)
    packed = 0

    def count(pack: Callable, tensor: torch.Tensor) -> object:
        nonlocal packed
        result = pack(tensor)
        packed += result is not tensor
        return result

    with tempfile.TemporaryDirectory() as folder, Live() as live:
        for parameter in model.parameters():
            live.sizes[parameter.untyped_storage()._cdata] = 0
        hooks = {
            "on the device": nullcontext(),
            "in files": Offload(model, Path(folder), TOKENS * H),
            "save_on_cpu": save_on_cpu(pin_memory=torch.cuda.is_available()),
        }[kind]
        if isinstance(hooks, saved_tensors_hooks):
            hooks.pack_hook = partial(count, hooks.pack_hook)
        with hooks:
            y = model(x)
        kept = sum(live.sizes.values()) - y.nbytes
        y.square().mean().backward()
    return kept, x.grad, packed


def check_view() -> None:
    """A view must write only its own bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path, _ = Offload(nn.Sequential(), Path(folder), 0).pack_hook(torch.randn(999, H)[5:9])
        assert path.stat().st_size < 100 * H * 4


def main() -> None:
    check_view()
    unit = TOKENS * H * 4
    kept, truth, _ = step("on the device")
    assert 0 <= 9 * LAYERS * unit - kept <= unit  # the output of the last layer is not counted
    print(f"{LAYERS} layers that keep 9 inputs each: {9 * LAYERS} predicted", end=", ")
    print(f"≈{kept / unit:.0f} kept")
    left, gradient, files = step("in files")
    assert torch.equal(gradient, truth)
    assert left < 0.05 * kept
    print(f"in files: ≈{left / unit:.0f} kept on the device, {files} files, gradient equal")
    _, gradient, packed = step("save_on_cpu")
    assert torch.equal(gradient, truth)
    assert packed == files + 2 * LAYERS  # it copies the weights, too
    print("torch.autograd.graph.save_on_cpu: gradient equal")
    print("\nh from which the copy hides behind a layer's forward, at 50 GB/s to the host:")
    for rate in (100, 200, 400, 800):
        everything, inputs = (n / 24 * rate * 1e12 / 50e9 for n in (34, 2))
        print(f"  {rate} TFLOP/s: {everything:7,.0f} for 34sbh, {inputs:5,.0f} for 2sbh")


if __name__ == "__main__":
    main()
