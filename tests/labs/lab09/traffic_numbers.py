"""Step 6: numbers in place of bytes"""

STEP, HINT = 6, "width"


def traffic(layers, hidden, tokens, width, tp, pp, dp):
    activation = tokens * hidden
    gradients = 12 * hidden**2 * layers / (tp * pp)
    return {
        "tp": 4 * layers / pp * 2 * (tp - 1) / tp * activation,
        "pp": min(pp - 1, 2) * activation,
        "dp": 2 * (dp - 1) / dp * gradients,
    }
