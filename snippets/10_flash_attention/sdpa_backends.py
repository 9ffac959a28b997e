"""This program shows which kernel SDPA starts, and why it refuses the flash kernel.

A dispatch mode records the operator that ran. Then only the flash backend is allowed. A call
that this backend refuses raises "No available kernel", and the reasons are printed as warnings.
"""

import statistics
import time
import warnings

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode


# --8<-- [start:which]
class Operators(TorchDispatchMode):
    """Record the name of every operator that runs below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def which(*tensors: torch.Tensor, **options) -> str:
    """Return the name of the fused kernel that runs for this call, or "math"."""
    with Operators() as operators:
        F.scaled_dot_product_attention(*tensors, **options)
    for name in operators.names:
        if name.startswith("_scaled_dot_product_"):
            return name.removeprefix("_scaled_dot_product_").split("_attention")[0]
    return "math"


# --8<-- [end:which]


# --8<-- [start:why_not]
def why_not(backend: SDPBackend, *tensors: torch.Tensor, **options) -> list[str]:
    """Allow only one backend. Return its reasons to refuse the call, or an empty list."""
    with sdpa_kernel(backend), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            F.scaled_dot_product_attention(*tensors, **options)
            return []
        except RuntimeError as error:
            reasons = [str(error).split("\n")[0]]
    section = ""
    for warning in caught:  # a header for each backend, then the first check that failed
        text = str(warning.message).split(" (Triggered")[0]
        if text.endswith("not used because:"):
            section = text
        elif section.startswith("Flash"):
            reasons.append(text)
    return reasons


# --8<-- [end:why_not]


def median_ms(function) -> float:
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    q, k, v = (torch.randn(1, 4, 64, 32, device=device, dtype=dtype) for _ in range(3))
    mask = torch.ones(64, 64, dtype=torch.bool, device=device).tril()
    bias = torch.zeros(64, 64, device=device, dtype=dtype, requires_grad=True)
    # --8<-- [start:cases]
    cases = {
        "plain": ((q, k, v), {}),
        "is_causal": ((q, k, v), {"is_causal": True}),
        "boolean mask": ((q, k, v), {"attn_mask": mask}),
        "one key head, enable_gqa": ((q, k[:, :1], v[:, :1]), {"enable_gqa": True}),
        "dropout_p=0.1": ((q, k, v), {"dropout_p": 0.1}),
        "a mask that is learned": ((q, k, v), {"attn_mask": bias}),
        "a mask of three dimensions": ((q, k, v), {"attn_mask": mask.expand(4, 64, 64)}),
        "no batch dimension": ((q[0], k[0], v[0]), {}),
        "values half as wide": ((q, k, v[..., :16]), {}),
        "keys stored as [d, s]": ((q, k.mT.contiguous().mT, v), {}),
    }
    # --8<-- [end:cases]
    masked, causal = (
        F.scaled_dot_product_attention(*cases[name][0], **cases[name][1])
        for name in ("boolean mask", "is_causal")
    )
    torch.testing.assert_close(masked, causal)  # two ways to say the same
    refused = {}
    for name, (tensors, options) in cases.items():
        ran = which(*tensors, **options)
        reasons = why_not(SDPBackend.FLASH_ATTENTION, *tensors, **options)
        assert cuda or (ran == "math") == bool(reasons), "the choice and the reasons disagree"
        print(f"{name:26} {ran}")
        if reasons:
            refused[name] = reasons
    assert refused, "something must be refused, or the reasons were not seen"
    if not cuda:
        always = {name for name in list(cases)[4:] if name != "no batch dimension"}
        assert always <= set(refused) <= {*always, "no batch dimension"}
        tensors, _ = cases["keys stored as [d, s]"]  # a slow call, but the same result
        torch.testing.assert_close(F.scaled_dot_product_attention(*tensors),
                                   F.scaled_dot_product_attention(q, k, v))  # fmt: skip
        assert all(len(said) > 1 for name, said in refused.items() if "learned" not in name)
    print("\nwith the flash backend alone:")
    for name, (error, *reasons) in refused.items():
        print(f"{name}: {' '.join(error.split())}")
        for reason in reasons:
            print(f"    {' '.join(reason.split())}")

    tokens, heads = (8192, 16) if cuda else (1024, 4)
    shape = 1, heads, tokens, 64
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    print(f"\n{tokens:,} tokens, {heads} heads of 64, causal:")
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):

        def call(backend=backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        with Operators() as operators:
            out = call()
        fused = any("flash" in name for name in operators.names)
        assert fused == (backend is SDPBackend.FLASH_ATTENTION)
        torch.testing.assert_close(out[:, :, 0], v[:, :, 0])  # the first token sees itself
        print(f"{backend.name:16} ≈{median_ms(call):.2f} ms")


if __name__ == "__main__":
    main()
