"""Step 1: the logarithm of a negative number"""

import math

STEP, HINT = 1, "spacing_sign"


def spacing(x, exponent, mantissa):
    power = math.floor(math.log2(x))
    smallest = 2 - 2 ** (exponent - 1)
    return 2.0 ** (max(power, smallest) - mantissa)
