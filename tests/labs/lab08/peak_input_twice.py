# ruff: noqa: F821 (names of the lab)
"""Step 7: the input twice"""

STEP, HINT = 7, "input_twice"


def predicted_peak(units: Sequence[Unit], chosen: Iterable[int]) -> int:
    """The most bytes of activations at a time, if these units (by index) are checkpointed."""
    chosen, before, peak = set(chosen), 0, 0
    for i, unit in enumerate(units):
        peak = max(peak, before + unit.held + unit.kept * (i in chosen))
        before += unit.kept if i in chosen else unit.held
    return peak
