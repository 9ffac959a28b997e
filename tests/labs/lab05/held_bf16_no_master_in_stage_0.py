"""Step 4: no master copy in stage 0"""

STEP, HINT = 4, "bf16_master"


def bytes_held_bf16(stage, ranks, fp32_sum=False):
    gradients = 4 if fp32_sum else 2
    return {
        "parameters": 2 / ranks if stage == 3 else 2,
        "gradients": gradients / ranks if stage >= 2 else gradients,
        "master": 4 / ranks if stage >= 1 else 0,
        "moments": 8 / ranks if stage >= 1 else 8,
    }
