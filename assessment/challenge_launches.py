"""The launches challenge: a step of LAMB in six kernels, for any number of parameters.

    python assessment/challenge_launches.py

LAMB (You et al., 2019) scales Adam's update of each parameter to the length of the parameter.
`SlowLamb` launches fourteen kernels for each and waits for two numbers. A GPU decides, by the
time of a step. Without one, counts do: launches, waits, and the kernels that Inductor writes.
"""

import importlib.util
import math
import re
import sys
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

BETA1, BETA2, EPSILON, DECAY, RATE = 0.9, 0.999, 1e-6, 0.01, 0.01
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}
COPIES = {"tolist", "numpy", "cpu"}  # to the host; on a CPU they are no operators


class SlowLamb:
    """What is wanted, for parameters of any shapes. Steps are taken under `torch.no_grad`."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, self.t = parameters, 0
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    def step(self) -> None:
        """An update by the gradients in `p.grad`, which stay as they are."""
        self.t += 1
        for p, (m, v) in zip(self.parameters, self.moments, strict=True):
            m.mul_(BETA1).add_(p.grad, alpha=1 - BETA1)
            v.mul_(BETA2).addcmul_(p.grad, p.grad, value=1 - BETA2)
            m_hat, v_hat = m / (1 - BETA1**self.t), v / (1 - BETA2**self.t)
            update = m_hat / (v_hat.sqrt() + EPSILON) + DECAY * p
            weight, length = p.norm().item(), update.norm().item()
            ratio = weight / length if weight > 0 and length > 0 else 1.0
            p.sub_(update, alpha=RATE * ratio)


class FastLamb:
    """The same. When it is made it may move the parameters into memory of its own.

    A backward pass adds to the `p.grad` that is there, and makes one where there is none.
    """

    def __init__(self, parameters: list[nn.Parameter]):
        # >>> solution 1: what a step needs, arranged so that few operators do for all
        # hint: parameters and gradients can be views of large tensors
        # hint: if each begins on a new row of them, sums of rows belong to one parameter
        row = 128
        rows = [math.ceil(p.numel() / row) for p in parameters]
        device = parameters[0].device
        self.owner = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).to(device)
        self.p, self.g, self.m, self.v = torch.zeros(4, sum(rows), row, device=device)
        self.sums = torch.zeros(len(rows), 2, device=device)  # of squares
        self.t = torch.zeros((), device=device)
        for p, own, grad in zip(
            parameters, self.p.split(rows), self.g.split(rows), strict=True
        ):
            own, grad = (x.view(-1)[: p.numel()].view(p.shape) for x in (own, grad))
            p.data, p.grad = own.copy_(p.data), grad
        # <<< solution

    def step(self) -> None:
        # >>> solution 1: SlowLamb's numbers; no number goes to the host or comes from it
        self.t += 1
        self.m.lerp_(self.g, 1 - BETA1)
        self.v.lerp_(self.g.square(), 1 - BETA2)
        m_hat, v_hat = self.m / (1 - BETA1**self.t), self.v / (1 - BETA2**self.t)
        update = m_hat / (v_hat.sqrt() + EPSILON) + DECAY * self.p
        squares = torch.stack([self.p.square().sum(1), update.square().sum(1)], 1)
        weight, length = self.sums.zero_().index_add_(0, self.owner, squares).sqrt().unbind(1)
        ratio = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
        self.p -= RATE * ratio[self.owner, None] * update
        # <<< solution


# --8<-- [start:count]
class Counted(TorchDispatchMode, TorchFunctionMode):
    """What eager mode launches, views left out, and what the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kinds = {x.dtype for x in args[1] if x is not None} if name == "index" else ()
        self.waits += name in WAITS or torch.bool in kinds  # how many does the mask select?
        self.launches += not func.is_view and name not in WAITS
        return func(*args, **(kwargs or {}))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.waits += func.__name__ in COPIES
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        TorchFunctionMode.__enter__(self)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        TorchFunctionMode.__exit__(self, *error)


def kernels(step: Callable[[], None]) -> int:
    """What Inductor would launch for a compiled step on a GPU: it writes the code and stops."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Written(Exception):
        """The code is there: do not compile it."""

    def stop(graph: GraphLowering) -> None:
        raise Written(graph.codegen()[0].value)

    target = {"get_current_target.return_value": GPUTarget("cuda", 90, 32)}
    target |= {"get_active_torch_device.return_value": torch.device("cpu")}
    torch._dynamo.reset()
    with (
        mock.patch.object(GraphLowering, "compile_to_module", stop),
        mock.patch.object(driver, "_active", mock.Mock(**target)),
        config.patch(cpu_backend="triton", fx_graph_cache=False),
    ):
        try:
            torch.compile(step, fullgraph=True)()
        except Exception as error:
            while error and type(error).__name__ != "Written":
                error, last = error.__cause__ or error.__context__, error
            if error is None:
                raise last from None
            code = str(error).split("def call(")[1]
    return len(re.findall(r"\.run\(|= torch\.ops\.|^ +(?:aten|extern_kernels)\.", code, re.M))


# --8<-- [end:count]
# --8<-- [start:gpu]
def ten(kind: type, captured: bool = False) -> tuple[torch.Tensor, float]:
    """On a GPU: 48 parameters after ten steps, and the microseconds of another.

    If captured, all but the first are replays of one CUDA graph.
    """
    own = parameters(48, "cuda")
    optimizer = kind(own)  # a graph does not keep the tensors that it works with
    step = optimizer.step
    with torch.no_grad():
        for i in range(10):
            backward(own, i)
            if captured and i == 1:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()  # recorded, and not run
                step = graph.replay
            step()
        after = torch.cat([p.flatten() for p in own])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            step()
        end.record()
        torch.cuda.synchronize()
    return after, begin.elapsed_time(end) / 20 * 1000


# --8<-- [end:gpu]


def parameters(count: int, device: str = "cpu") -> list[nn.Parameter]:
    """Parameters of several shapes; the second is zeros."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(8, 40), (8,), (3, 5, 7), (130,), (), (16, 16)]
    found = [nn.Parameter(torch.randn(shapes[i % 6], generator=draw)) for i in range(count)]
    found[1].data.zero_()
    return [nn.Parameter(p.data.to(device)) for p in found]


def backward(own: list[nn.Parameter], step: int = 0) -> None:
    """Gradients as a backward pass leaves them: in the `p.grad` that is there, or a new one."""
    draw = torch.Generator().manual_seed(step)
    for p in own:
        grad = torch.randn(p.shape, generator=draw).to(p.device)
        p.grad = grad if p.grad is None else p.grad.copy_(grad)


def main() -> None:
    print("parameters            6   12   24")
    results = []
    for kind in (SlowLamb, FastLamb):
        counts = []
        for count in (6, 12, 24):
            own = parameters(count)
            optimizer = kind(own)
            backward(own)
            with torch.no_grad(), Counted() as counted:
                optimizer.step()
            counts.append(counted)
        results.append(own)
        print(f"{kind.__name__}  launches", *(f"{each.launches:4}" for each in counts))
        print("          waits   ", *(f"{each.waits:4}" for each in counts))
    torch.testing.assert_close(*results)
    if importlib.util.find_spec("triton"):
        with torch.no_grad():
            print(f"FastLamb, compiled: {kernels(optimizer.step)} kernels")
    if torch.cuda.is_available():
        (true, slow), (found, fast) = ten(SlowLamb), ten(FastLamb, captured=True)
        torch.testing.assert_close(found, true, rtol=0, atol=5e-5)
        print(f"a step: ≈{slow:.0f} µs, fast and captured ≈{fast:.0f} µs")


def stop_at_blank(kind, error, trace) -> None:
    if kind is not NotImplementedError:
        return sys.__excepthook__(kind, error, trace)
    sys.exit(f"a blank: {error}")


if __name__ == "__main__":
    sys.excepthook = stop_at_blank
    main()
