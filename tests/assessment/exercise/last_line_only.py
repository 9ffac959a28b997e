"""Step 1: the log has the last step only"""

STEP, HINT = 1, "log"


def write_log(folder: Path, losses: list[float]) -> None:
    """A line for each step."""
    lines = [f"{step},{loss}\n" for step, loss in enumerate(losses, start=1)]
    (folder / "log.csv").write_text(lines[-1])
