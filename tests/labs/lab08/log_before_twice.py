# ruff: noqa: F821 (names of the lab)
"""Step 2: the second loss comes before the update"""

STEP, HINT = 2, "log_values"


def logged_step(model: Net, adam: torch.optim.Adam, inputs, targets, log: list) -> None:
    """Update once; log the loss of this batch before and after, and leave nothing else."""
    before = mean_square(model(inputs), targets)
    before.backward()
    with torch.no_grad():
        after = mean_square(model(inputs), targets)
    adam.step()
    adam.zero_grad()
    log.append((before.item(), after.item()))
