# ruff: noqa: F821 (names of the lab)
"""Step 8: by size"""

STEP, HINT = 8, "order_kept"


def long_lived_first(trace: Sequence[Event]) -> list[Event]:
    """The same events; tensors that are never freed come first, all else in its old order."""
    freed = {event.name for event in trace if event.size == 0}
    return sorted(trace, key=lambda event: (event.name in freed, -event.size))
