"""Step 5: a Python number widens"""

import torch

STEP, HINT = 5, "no_list"


def output_dtypes(kind, low):
    wide = torch.float32
    return {
        "norm": wide,
        "linear": low,
        "scores": low,
        "softmax": low if kind == "cpu" else wide,
        "mixed": low,
        "gelu": low,
        "residual": wide,
        "cat": wide,
        "scaled": wide,
        "double": torch.float64,
        "loss": wide,
        "island": wide,
    }
