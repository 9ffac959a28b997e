"""Step 5: nothing fits"""

STEP, HINT = 5, "rows_none"


def rows_that_fit(limit: int, fixed: int, each: int) -> int:
    """The most rows for which `fixed` bytes and `each` bytes a row are within the limit.

    Raises OutOfMemory if that is not even one.
    """
    rows = (limit - fixed) // each
    return rows
