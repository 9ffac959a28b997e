"""Step 2: more sectors than lanes"""

STEP, HINT = 2, "sectors_few"


def sectors(stride: int) -> int:
    """Sectors of 32 bytes that lanes 0 to 31 touch which read the floats number lane * stride.

    Lane 0's float lies at the beginning of a sector.
    """
    return 4 * stride
