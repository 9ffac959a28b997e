"""Step 5: a loss of low numbers is low"""

import torch

STEP, HINT = 5, "loss_list"


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
        "scaled": low,
        "double": torch.float64,
        "loss": low,
        "island": wide,
    }
