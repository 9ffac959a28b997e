"""Step 3: no fp32 copy in fp32 training"""

STEP, HINT = 3, "master_forgotten"


def bytes_held(stage, ranks):
    return {
        "parameters": 4 / ranks if stage == 3 else 4,
        "gradients": 4 / ranks if stage >= 2 else 4,
        "master": 0,
        "moments": 8 / ranks if stage >= 1 else 8,
    }
