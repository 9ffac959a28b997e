"""Step 1: the field 0 for the smallest normal number"""

STEP, HINT = 1, "normal_exponent"


def format_numbers(exponent, mantissa, finite=False):
    bias = 2 ** (exponent - 1) - 1
    if finite:
        top, fraction = (2**exponent - 1, 2**mantissa - 2)
    else:
        top, fraction = (2**exponent - 2, 2**mantissa - 1)
    return {
        "max": 2.0 ** (top - bias) * (1 + fraction / 2**mantissa),
        "smallest_normal": 2.0 ** (-bias),
        "smallest_subnormal": 2.0 ** (1 - bias - mantissa),
        "eps": 2.0 ** (-mantissa),
    }
