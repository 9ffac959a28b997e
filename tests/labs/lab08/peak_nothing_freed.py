# ruff: noqa: F821 (names of the lab)
"""Step 7: everything is there to the end"""

STEP, HINT = 7, "freed_already"


def predicted_peak(units: Sequence[Unit], chosen: Iterable[int]) -> int:
    """The most bytes of activations at a time, if these units (by index) are checkpointed."""
    chosen, before, peak = set(chosen), 0, 0
    for i, unit in enumerate(units):
        before += unit.kept if i in chosen else unit.held
        if i in chosen:
            peak = max(peak, unit.held - unit.kept)
    return before + peak
