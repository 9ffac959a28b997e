"""Step 8: the path in place of the step"""

STEP, HINT = 8, "resume_step"


def resume(engine, folder):
    path, _ = engine.load_checkpoint(folder)
    if path is None:
        raise FileNotFoundError(folder)
    return path
