"""The default of every switch that decides how fp32 and 16-bit products are computed.

The program only reads the switches, so it needs no GPU. Then it sets one switch at a time, and
prints which other switches change with it. Look for the two lines with RuntimeError: there, a
getter of the old API raises because the new API was used.
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
    """The value of each switch, and the message of the last getter that raised."""
    values: dict[str, object] = {}
    for name in SWITCHES:
        shown = name if len(name) < 40 else "…" + name.rpartition(".")[2]
        try:
            value = attrgetter(name.removesuffix("()"))(torch)
            values[shown] = value() if name.endswith("()") else value
        except RuntimeError as error:  # both APIs were used
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


GETTERS = (
    "get_float32_matmul_precision",
    "backends.cuda.matmul.allow_tf32",
    "backends.cudnn.allow_tf32",
)


def old_getters_that_raise() -> list[str]:
    """The getters of the old API that raise, even in a library that only reads a setting."""
    found = []
    for name in GETTERS:
        try:
            value = attrgetter(name)(torch)
            _ = value() if callable(value) else value
        except RuntimeError:
            found.append(name)
    return found


def main() -> None:
    before = read()
    for name, value in before.items():
        print(f"{name:42} {value}")
    torch.backends.fp32_precision = "tf32"
    print('backends.fp32_precision = "tf32" changes')
    moved(before)
    assert old_getters_that_raise() == [*GETTERS[:2]]
    torch.backends.fp32_precision = "none"
    assert not old_getters_that_raise()  # this undoes the change
    torch.set_float32_matmul_precision("high")
    print('set_float32_matmul_precision("high") changes')
    moved(before)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    print('and after backends.cuda.matmul.fp32_precision = "ieee"')
    moved(before)


if __name__ == "__main__":
    main()
