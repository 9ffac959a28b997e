"""operator torchvision::nms does not exist: two packages that were built for two torches.

torchvision brings operators in a compiled library and tells torch about them in Python. If the
library was built for another torch it does not load, silently, and the first line of Python
which speaks of an operator fails. numpy can be missing in the same quiet way.
"""

import subprocess
import sys

import torch

# what torchvision/_meta_registrations.py does when torchvision is imported
FROM_TORCHVISION = """
import torch
torch.library.register_fake("torchvision::nms")(lambda boxes, scores, threshold: scores)
"""
WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # as where it is not installed, or not for this Python
import torch
print(torch.ones(2).tolist())
torch.ones(2).numpy()
"""


def said_by(code: str) -> tuple[str, str]:
    """What a program prints, and the last line of the error with which it ends."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    return done.stdout.strip(), done.stderr.strip().splitlines()[-1]


def main() -> None:
    _, said = said_by(FROM_TORCHVISION)
    print(said)
    assert said == "RuntimeError: operator torchvision::nms does not exist"

    # with its library loaded, the operator is there, and the same line passes
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    exec(FROM_TORCHVISION)
    boxes, scores = torch.ones(3, 4, device="meta"), torch.ones(3, device="meta")
    assert torch.ops.torchvision.nms(boxes, scores, 0.5).shape == (3,)  # as it was told
    print("with the operator defined first: no error")

    printed, said = said_by(WITHOUT_NUMPY)
    print(said)
    assert said == "RuntimeError: Numpy is not available"
    print(f"without .numpy(): {printed}")


if __name__ == "__main__":
    main()
