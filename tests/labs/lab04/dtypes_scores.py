"""Step 5: a product takes what it gets"""

import torch

STEP, HINT = 5, "matmul_low"


def output_dtypes(kind, low):
    wide = torch.float32
    return {
        "norm": wide,
        "linear": low,
        "scores": wide,
        "softmax": low if kind == "cpu" else wide,
        "mixed": low,
        "gelu": low,
        "residual": wide,
        "cat": wide,
        "scaled": low,
        "double": torch.float64,
        "loss": wide,
        "island": wide,
    }
