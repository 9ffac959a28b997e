# ruff: noqa: F821 (names of the lab)
"""Step 2: a graph that is kept on purpose"""

STEP, HINT = 2, "retained"


def logged_step(model: Net, adam: torch.optim.Adam, inputs, targets, log: list) -> None:
    """Update once; log the loss of this batch before and after, and leave nothing else."""
    before = mean_square(model(inputs), targets)
    before.backward(retain_graph=True)
    adam.step()
    adam.zero_grad()
    with torch.no_grad():
        after = mean_square(model(inputs), targets)
    log.append((before, after.item()))
