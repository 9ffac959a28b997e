"""Step 8: the step is not saved"""

STEP, HINT = 8, "save_step"


def save(engine, folder, step):
    engine.save_checkpoint(folder)
