"""The loss and the norm for the progress line have passes of their own."""

STEP, HINT = 10, "slow"

INSTEAD = {
    """
            loss = accumulate(config, model, rows)
""": """
            for _ in ("loss", "norm"):
                accumulate(config, model, rows)
                optimizer.zero_grad()
            loss = accumulate(config, model, rows)
"""
}
