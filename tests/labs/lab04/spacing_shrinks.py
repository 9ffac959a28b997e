"""Step 1: steps that shrink below the smallest normal number"""

import math

STEP, HINT = 1, "spacing_subnormal"


def spacing(x, exponent, mantissa):
    power = math.frexp(x)[1] - 1
    return 2.0 ** (power - mantissa)
