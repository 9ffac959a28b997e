"""Step 6: moments in bf16 beside the copy"""

STEP, HINT = 6, "bytes_moments"


def bytes_per_parameter(recipe):
    size = 4 if recipe == "fp32" else 2
    return {
        "parameters": size,
        "gradients": size,
        "master": 4 if recipe == "master" else 0,
        "moments": 8 if recipe == "fp32" else 4,
    }
