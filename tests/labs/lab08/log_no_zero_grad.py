# ruff: noqa: F821 (names of the lab)
"""Step 2: gradients add up"""

STEP, HINT = 2, "zero_grad"


def logged_step(model: Net, adam: torch.optim.Adam, inputs, targets, log: list) -> None:
    """Update once; log the loss of this batch before and after, and leave nothing else."""
    before = mean_square(model(inputs), targets)
    before.backward()
    adam.step()
    with torch.no_grad():
        after = mean_square(model(inputs), targets)
    log.append((before.item(), after.item()))
