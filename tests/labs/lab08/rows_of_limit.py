# ruff: noqa: F821 (names of the lab)
"""Step 5: the rest is forgotten"""

STEP, HINT = 5, "rows_fixed"


def rows_that_fit(limit: int, fixed: int, each: int) -> int:
    """The most rows for which `fixed` bytes and `each` bytes a row are within the limit.

    Raises OutOfMemory if that is not even one.
    """
    rows = limit // each
    if rows < 1:
        raise OutOfMemory("not one row fits")
    return rows
