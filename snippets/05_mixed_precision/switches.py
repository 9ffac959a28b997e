"""Every switch that decides how fp32 and 16-bit products are computed, with its default.

Nothing here needs a GPU: the switches are read, not used. Then one
assignment or call, and which of the others it moves.
"""

import os
from operator import attrgetter

import torch

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
SWITCHES = [  # all in `torch`
    "get_float32_matmul_precision()",
    "backends.cuda.matmul.allow_tf32",
    "backends.cudnn.allow_tf32",
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "are_deterministic_algorithms_enabled()",
]


def read() -> dict[str, object]:
    values: dict[str, object] = {}
    for name in SWITCHES:
        shown = name if len(name) < 40 else "…" + name.rpartition(".")[2]
        try:
            value = attrgetter(name.removesuffix("()"))(torch)
            values[shown] = value() if name.endswith("()") else value
        except RuntimeError as error:  # old and new switches disagree
            values[shown], values["message"] = "RuntimeError", str(error)
    values[CUBLAS] = os.environ.get(CUBLAS, "not set")
    return values


def moved(before: dict[str, object]) -> None:
    """Print every switch that differs from `before`, and the end of the last error."""
    now = read()
    message = str(now.pop("message", ""))
    for name, value in now.items():
        if value != before[name]:
            print(f"  {name:40} {before[name]} -> {value}")
    if message:
        print(f"  RuntimeError: …{message.split('.')[0].split(',')[-1]}")


def main() -> None:
    before = read()
    for name, value in before.items():
        print(f"{name:42} {value}")
    torch.backends.fp32_precision = "tf32"
    print('backends.fp32_precision = "tf32" moves')
    moved(before)
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("high")
    print('set_float32_matmul_precision("high") moves')
    moved(before)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    print('and after backends.cuda.matmul.fp32_precision = "ieee"')
    moved(before)


if __name__ == "__main__":
    main()
