"""Step 1: epsilon times x"""

STEP, HINT = 1, "spacing_relative"


def spacing(x, exponent, mantissa):
    smallest = 2 - 2 ** (exponent - 1)
    return max(x, 2.0**smallest) * 2.0 ** (-mantissa)
