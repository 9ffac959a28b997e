"""Step 4: the sum is kept besides the gradient"""

STEP, HINT = 4, "fp32_sum"


def bytes_held_bf16(stage, ranks, fp32_sum=False):
    gradients = 6 if fp32_sum else 2
    return {
        "parameters": 2 / ranks if stage == 3 else 2,
        "gradients": gradients / ranks if stage >= 2 else gradients,
        "master": 4 / ranks if stage >= 1 else 4,
        "moments": 8 / ranks if stage >= 1 else 8,
    }
