"""Step 1: the largest power of two"""

STEP, HINT = 1, "max_mantissa"


def format_numbers(exponent, mantissa, finite=False):
    bias = 2 ** (exponent - 1) - 1
    if finite:
        top, fraction = (2**exponent - 1, 2**mantissa - 2)
    else:
        top, fraction = (2**exponent - 2, 0)
    return {
        "max": 2.0 ** (top - bias) * (1 + fraction / 2**mantissa),
        "smallest_normal": 2.0 ** (1 - bias),
        "smallest_subnormal": 2.0 ** (1 - bias - mantissa),
        "eps": 2.0 ** (-mantissa),
    }
