"""Step 6: the sum alone"""

STEP, HINT = 6, "bytes_kind"


def bytes_per_parameter(recipe):
    size = 4 if recipe == "fp32" else 2
    held = {
        "parameters": size,
        "gradients": size,
        "master": 4 if recipe == "master" else 0,
        "moments": 4 if recipe == "bf16" else 8,
    }
    return sum(held.values())
