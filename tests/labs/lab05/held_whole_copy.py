"""Step 3: the copy is whole on every rank"""

STEP, HINT = 3, "optimizer_stage"


def bytes_held(stage, ranks):
    return {
        "parameters": 4 / ranks if stage == 3 else 4,
        "gradients": 4 / ranks if stage >= 2 else 4,
        "master": 4 if stage >= 1 else 0,
        "moments": 8 / ranks if stage >= 1 else 8,
    }
