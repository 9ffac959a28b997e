"""Autocast's lists can be found by calling each operator on fp32 and on 16-bit inputs.

The two types of the result show the list. If both results are 16-bit, the operator is on the
list for the lower precision. If both are fp32, it is on the fp32 list. If each result has the
type of its input, the operator is on neither of these lists: it is on the list for the widest
type, or on no list. For CUDA the program uses fake tensors, which
have a device and a type but no data, so it needs no GPU. For the CPU it uses real tensors.

Compare the two devices: on a CPU, softmax, norms, exp and pow are on no list.
"""

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

LOW = torch.bfloat16
ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x),
    "bmm": lambda x: torch.bmm(x.unsqueeze(0), x.unsqueeze(0)),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "conv1d": lambda x: F.conv1d(x.unsqueeze(0), x.unsqueeze(2)),
    "sdpa": lambda x: F.scaled_dot_product_attention(*3 * [x.unsqueeze(0)]),
    "prelu": lambda x: F.prelu(x, x.flatten().narrow(0, 0, 1)),
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "exp": torch.exp,
    "log": torch.log,
    "pow": lambda x: x**2,
    "rsqrt": torch.rsqrt,
    "sum": torch.sum,
    "mean": torch.mean,
    "var": torch.var,
    "cumsum": lambda x: x.cumsum(0),
    "prod": torch.prod,
    "norm": torch.norm,
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(-1)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "kl_div": lambda x: F.kl_div(x, x, reduction="sum"),
    "bce": lambda x: F.binary_cross_entropy(x.sigmoid(), x.sigmoid()),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
}
TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "cross": lambda x, y: torch.cross(x.narrow(1, 0, 3), y.narrow(1, 0, 3), dim=1),
    "bilinear": lambda x, y: F.bilinear(x, y, y.unsqueeze(0)),
}


def ask(device: str, op: Callable, *dtypes: torch.dtype) -> str:
    """Return the type of the result of `op` under autocast, for inputs [8, 8] of `dtypes`."""
    with contextlib.nullcontext() if device == "cpu" else FakeTensorMode():
        inputs = [torch.rand(8, 8, device=device).to(d) for d in dtypes]
        torch.set_autocast_enabled(device, True)  # as the context manager does
        torch.set_autocast_dtype(device, LOW)
        try:
            return {LOW: "low", torch.float32: "fp32"}[op(*inputs).dtype]
        except RuntimeError as error:
            return "unsafe" if "unsafe to autocast" in str(error) else "error"
        finally:
            torch.set_autocast_enabled(device, False)


def verdict(device: str, op: Callable) -> str:
    """The list that contains an operator of one input."""
    seen = ask(device, op, torch.float32), ask(device, op, LOW)
    return {
        ("low", "low"): "lower precision",
        ("fp32", "fp32"): "fp32",
        ("fp32", "low"): "as given",
        ("unsafe", "unsafe"): "refused",
    }[seen]


def main() -> None:
    lists: dict[str, dict[str, list[str]]] = {}
    for device in ("cuda", "cpu"):
        lists[device] = {}
        for name, op in ONE.items():
            lists[device].setdefault(verdict(device, op), []).append(name)
        print(f"{device}:")
        for verdict_ in ("lower precision", "fp32", "as given", "refused"):
            print(f"  {verdict_}: {', '.join(lists[device].get(verdict_, ['none']))}")
    for name, op in ONE.items():
        assert op.__name__ in (name, "<lambda>")
    differs = set(lists["cuda"]["fp32"]) & set(lists["cpu"]["as given"])
    print(f"fp32 on cuda and as given on cpu: {len(differs)} of {len(ONE)} operators")
    all_differ = {n for n, op in ONE.items() if verdict("cuda", op) != verdict("cpu", op)}
    assert all_differ == differs | {"bce"}
    print(f"a different rule on the two devices: {len(all_differ)}, these and bce")
    print("fp32 and 16 bits together:   cuda    cpu")
    for name, op in TWO.items():
        answers = [ask(device, op, torch.float32, LOW) for device in ("cuda", "cpu")]
        # the order of the two inputs must not matter
        assert answers == [ask(device, op, LOW, torch.float32) for device in ("cuda", "cpu")]
        print(f"  {name:25}  {answers[0]:6}  {answers[1]}")
    x = torch.rand(4)
    torch.set_autocast_enabled("cpu", True)
    assert (x[None] @ x[:, None]).dtype == LOW  # autocast is on
    print("float64 stays:", (x.double()[None] @ x.double()[:, None]).dtype)
    print("an explicit dtype= wins:", F.softmax(x, 0, dtype=torch.float64).dtype)
    torch.set_autocast_enabled("cpu", False)
    wins = ask("cuda", lambda x: F.softmax(x, 0, dtype=LOW), torch.float32)
    assert wins == "low"  # where softmax is on the fp32 list, too


if __name__ == "__main__":
    main()
