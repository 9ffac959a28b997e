"""Reproduces "operator torchvision::nms does not exist" and "Numpy is not available".

The operators of torchvision are in a compiled library. If this library was built for a
different release of torch, it is not loaded, and no message appears. The error comes later,
when Python code uses an operator. A missing numpy also causes an error only when it is used.
"""

import subprocess
import sys

import torch

# torchvision/_meta_registrations.py runs these lines when torchvision is imported
FROM_TORCHVISION = """
import torch
torch.library.register_fake("torchvision::nms")(lambda boxes, scores, threshold: scores)
"""
WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # as if numpy was not installed
import torch
print(torch.ones(2).tolist())
torch.ones(2).numpy()
"""


def run_until_error(code: str) -> tuple[str, str]:
    """Run a program that must fail. Return its output and the last line of its error."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    return done.stdout.strip(), done.stderr.strip().splitlines()[-1]


def main() -> None:
    _, error = run_until_error(FROM_TORCHVISION)
    print(error)
    assert error == "RuntimeError: operator torchvision::nms does not exist"

    # if the library is loaded, the operator exists, and the same lines succeed
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    exec(FROM_TORCHVISION)
    boxes, scores = torch.ones(3, 4, device="meta"), torch.ones(3, device="meta")
    assert torch.ops.torchvision.nms(boxes, scores, 0.5).shape == (3,)
    print("if the operator is defined first: no error")

    printed, error = run_until_error(WITHOUT_NUMPY)
    print(error)
    assert error == "RuntimeError: Numpy is not available"
    print(f"a program without numpy still prints a tensor: {printed}")


if __name__ == "__main__":
    main()
