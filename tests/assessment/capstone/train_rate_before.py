"""The learning rate is that of the step before."""

STEP, HINT = 10, "not_truth"

INSTEAD = {"= rate(config, step)": "= rate(config, step - 1)"}
