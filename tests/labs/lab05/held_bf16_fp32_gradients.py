"""Step 4: gradients in fp32"""

STEP, HINT = 4, "bf16_two"


def bytes_held_bf16(stage, ranks, fp32_sum=False):
    gradients = 4
    return {
        "parameters": 2 / ranks if stage == 3 else 2,
        "gradients": gradients / ranks if stage >= 2 else gradients,
        "master": 4 / ranks if stage >= 1 else 4,
        "moments": 8 / ranks if stage >= 1 else 8,
    }
