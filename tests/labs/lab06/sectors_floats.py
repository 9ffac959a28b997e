"""Step 2: floats counted as bytes"""

STEP, HINT = 2, "sectors_bytes"


def sectors(stride: int) -> int:
    """Sectors of 32 bytes that lanes 0 to 31 touch which read the floats number lane * stride.

    Lane 0's float lies at the beginning of a sector.
    """
    return len({lane * stride // 32 for lane in range(32)})
