"""Each life begins at the first step."""

STEP, HINT = 10, "lost_steps"

INSTEAD = {"step = load(config, model, optimizer, stream)": "step = 0"}
