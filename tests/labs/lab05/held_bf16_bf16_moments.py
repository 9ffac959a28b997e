"""Step 4: moments in bf16"""

STEP, HINT = 4, "fp32_states"


def bytes_held_bf16(stage, ranks, fp32_sum=False):
    gradients = 4 if fp32_sum else 2
    return {
        "parameters": 2 / ranks if stage == 3 else 2,
        "gradients": gradients / ranks if stage >= 2 else gradients,
        "master": 4 / ranks if stage >= 1 else 4,
        "moments": 4 / ranks if stage >= 1 else 4,
    }
