"""Step 1: the exponent of frexp as it is"""

import math

STEP, HINT = 1, "spacing_power"


def spacing(x, exponent, mantissa):
    power = math.frexp(x)[1]
    smallest = 2 - 2 ** (exponent - 1)
    return 2.0 ** (max(power, smallest) - mantissa)
