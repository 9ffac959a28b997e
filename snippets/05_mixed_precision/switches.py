"""Every switch that decides how fp32 and 16-bit products are computed, with its default.

Nothing here needs a GPU: the switches are read, not used. Then one
assignment or call, and which of the others it moves.
"""

import os

import torch

SWITCHES = {
    "get_float32_matmul_precision()": lambda: torch.get_float32_matmul_precision(),
    "backends.cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
    "backends.cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "backends.fp32_precision": lambda: torch.backends.fp32_precision,
    "backends.cuda.matmul.fp32_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
    "backends.cudnn.conv.fp32_precision": lambda: torch.backends.cudnn.conv.fp32_precision,
    "backends.cudnn.rnn.fp32_precision": lambda: torch.backends.cudnn.rnn.fp32_precision,
    "backends.mkldnn.matmul.fp32_precision": lambda: (
        torch.backends.mkldnn.matmul.fp32_precision
    ),
    "…allow_bf16_reduced_precision_reduction": lambda: (
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "…allow_fp16_reduced_precision_reduction": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "…allow_fp16_accumulation": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "backends.cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "backends.cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "CUBLAS_WORKSPACE_CONFIG": lambda: os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set"),
}


def read() -> dict[str, object]:
    values = {}
    for name, getter in SWITCHES.items():
        try:
            values[name] = getter()
        except RuntimeError as error:  # old and new switches disagree
            values[name], values["message"] = "RuntimeError", str(error)
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
