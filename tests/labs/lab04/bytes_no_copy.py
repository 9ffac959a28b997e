"""Step 6: the copy forgotten"""

STEP, HINT = 6, "bytes_master"


def bytes_per_parameter(recipe):
    size = 4 if recipe == "fp32" else 2
    return {
        "parameters": size,
        "gradients": size,
        "master": 0,
        "moments": 4 if recipe == "bf16" else 8,
    }
