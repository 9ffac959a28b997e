"""Step 1: finite formats like the others"""

STEP, HINT = 1, "finite_max"


def format_numbers(exponent, mantissa, finite=False):
    bias = 2 ** (exponent - 1) - 1
    if False:
        top, fraction = (2**exponent - 1, 2**mantissa - 2)
    else:
        top, fraction = (2**exponent - 2, 2**mantissa - 1)
    return {
        "max": 2.0 ** (top - bias) * (1 + fraction / 2**mantissa),
        "smallest_normal": 2.0 ** (1 - bias),
        "smallest_subnormal": 2.0 ** (1 - bias - mantissa),
        "eps": 2.0 ** (-mantissa),
    }
