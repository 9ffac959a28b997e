"""Training with Adam keeps about sixteen bytes for each parameter, counted on real tensors.

The program compares three ways to keep the state. In plain fp32, the parameters, the gradients
and two moments have 4 bytes each. In mixed precision as in the ZeRO paper (Rajbhandari et al.,
2020, Section 3.1), parameters and gradients have 16 bits, and the optimizer has a master copy
and two moments in fp32. The third way is the same, but gradients are accumulated in fp32, as in
large runs. The update is compared with torch.optim.Adam, and the total number of bytes is
compared with the memory of the process that the operating system reports.
"""

import ctypes
import gc
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

LAYERS, WIDTH = 8, 1024
STEPS = 5  # in the comparison with torch.optim.Adam
LR, BETA1, BETA2, EPS = 1e-3, 0.9, 0.999, 1e-8


class MixedPrecisionAdam:
    """Adam for 16-bit parameters, with master weights and both moments in fp32."""

    def __init__(self, model: nn.Module, fp32_gradients: bool) -> None:
        self.parameters = list(model.parameters())
        self.master = [p.detach().float() for p in self.parameters]
        self.first = [torch.zeros_like(w) for w in self.master]
        self.second = [torch.zeros_like(w) for w in self.master]
        self.accumulated: list[torch.Tensor] = []
        self.steps = 0
        if fp32_gradients:
            self.accumulated = [torch.zeros_like(w) for w in self.master]
            for parameter, total in zip(self.parameters, self.accumulated, strict=True):
                parameter.register_post_accumulate_grad_hook(self.accumulate_into(total))

    @staticmethod
    def accumulate_into(total: torch.Tensor):
        def hook(parameter: nn.Parameter) -> None:
            total.add_(parameter.grad)
            parameter.grad = None  # the gradient in 16 bits exists for one layer only

        return hook

    def gradients(self) -> list[torch.Tensor]:
        return self.accumulated or [p.grad for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        correction1, correction2 = 1 - BETA1**self.steps, 1 - BETA2**self.steps
        for parameter, gradient, master, first, second in zip(
            self.parameters, self.gradients(), self.master, self.first, self.second, strict=True
        ):
            gradient = gradient.float()  # one tensor at a time, freed in the next iteration
            first.lerp_(gradient, 1 - BETA1)
            second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
            root = second.sqrt().div_(math.sqrt(correction2)).add_(EPS)
            master.addcdiv_(first, root, value=-LR / correction1)
            parameter.copy_(master)  # rounded to 16 bits for the next forward pass


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of `tensors`. Each storage counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def resident() -> int:
    """Bytes of memory that this process uses, or 0 if the system has no /proc."""
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)  # return freed memory, so that it is not counted
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)


def mixed(fp32_gradients: bool) -> tuple[dict[str, int], int, list]:
    model = build(torch.bfloat16)
    optimizer = MixedPrecisionAdam(model, fp32_gradients)
    x = torch.ones(8, WIDTH, dtype=torch.bfloat16)
    model(x).backward(x)
    optimizer.step()

    parts = {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(optimizer.gradients()),
        "master weights": bytes_of(optimizer.master),
        "first moment": bytes_of(optimizer.first),
        "second moment": bytes_of(optimizer.second),
    }
    return parts, sum(p.numel() for p in model.parameters()), [model, optimizer]


def check_against_torch(fp32_gradients: bool, steps: int) -> None:
    """Give torch.optim.Adam the same gradients. The master weights must equal its weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).to(torch.bfloat16)
    ours = MixedPrecisionAdam(model, fp32_gradients)
    reference = [w.clone().requires_grad_() for w in ours.master]
    adam = torch.optim.Adam(reference, lr=LR, betas=(BETA1, BETA2), eps=EPS)
    for _ in range(steps):
        sums = [torch.zeros_like(w) for w in ours.master]
        for _ in range(2):  # micro-batches
            x = torch.randn(16, 32, dtype=torch.bfloat16)
            x[:, 0] = 0  # its weights get gradient 0, so only epsilon prevents 0/0
            x[:, 1] *= 1e-5  # the gradients of its weights are about as small as epsilon
            loss = model(x).square().mean()
            parts = torch.autograd.grad(loss, ours.parameters, retain_graph=True)
            for total, part in zip(sums, parts, strict=True):
                total += part
            loss.backward()
        for weight, gradient, total in zip(reference, ours.gradients(), sums, strict=True):
            rounding = 0 if fp32_gradients else 0.01  # only a sum in 16 bits is rounded
            assert (gradient - total).norm() <= rounding * total.norm()
            weight.grad = gradient.float().clone()
        ours.step()
        adam.step()
        for gradient in ours.gradients():
            gradient.zero_()
        for parameter, master, weight in zip(
            ours.parameters, ours.master, reference, strict=True
        ):
            torch.testing.assert_close(master, weight.detach(), rtol=0, atol=LR / 1000)
            assert torch.equal(parameter, master.bfloat16())


def plain() -> tuple[dict[str, int], int, list]:
    model = build(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    model(torch.ones(8, WIDTH)).square().sum().backward()
    optimizer.step()
    state = optimizer.state.values()
    parts = {
        "parameters": bytes_of(model.parameters()),
        "gradients": bytes_of(p.grad for p in model.parameters()),
        "master weights": 0,
        "first moment": bytes_of(s["exp_avg"] for s in state),
        "second moment": bytes_of(s["exp_avg_sq"] for s in state),
    }
    return parts, sum(p.numel() for p in model.parameters()), [model, optimizer]


def main() -> None:
    columns = {
        "fp32": plain,
        "bf16": lambda: mixed(fp32_gradients=False),
        "bf16, fp32 grads": lambda: mixed(fp32_gradients=True),
    }
    for make in columns.values():  # load every kernel before memory is measured
        make()
    counted, watched = {}, {}
    for name, make in columns.items():
        before = resident()
        parts, psi, alive = make()
        watched[name] = (resident() - before) / psi
        counted[name] = {part: size / psi for part, size in parts.items()}
        alive.clear()
        assert watched[name] < sum(counted[name].values()) + 1.5  # nothing large is missing

    print(f"Ψ = {psi:,} parameters; bytes for each of them")
    print(f"{'':16}" + "".join(f"{name:>18}" for name in columns))
    for part in counted["fp32"]:
        print(f"{part:16}" + "".join(f"{counted[name][part]:18.0f}" for name in columns))
    print(f"{'sum':16}" + "".join(f"{sum(counted[n].values()):18.0f}" for n in columns))
    print(f"{'process grew by':16}" + "".join(f"{f'≈{watched[n]:.1f}':>18}" for n in columns))
    for fp32_gradients in (False, True):
        check_against_torch(fp32_gradients, steps=STEPS)
    print(f"{STEPS} steps of ours equal torch.optim.Adam's on the same gradients")


if __name__ == "__main__":
    main()
