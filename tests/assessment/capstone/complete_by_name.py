"""Sorted as words."""

STEP, HINT = 8, "steps_sorted"


def complete(config: Config) -> list[int]:
    """The steps of the complete checkpoints, oldest first."""
    names = [path.name for path in Path(config.folder).glob("step-*")]
    return [int(name[5:]) for name in sorted(names) if name[5:].isdecimal()]
