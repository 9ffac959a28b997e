"""Step 6: gradients in fp32"""

STEP, HINT = 6, "bytes_16"


def bytes_per_parameter(recipe):
    size = 4 if recipe == "fp32" else 2
    return {
        "parameters": size,
        "gradients": 4,
        "master": 4 if recipe == "master" else 0,
        "moments": 4 if recipe == "bf16" else 8,
    }
