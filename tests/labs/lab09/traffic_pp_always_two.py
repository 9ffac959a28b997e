"""Step 6: two messages for every stage"""

STEP, HINT = 6, "pp_ends"


def traffic(layers, hidden, tokens, width, tp, pp, dp):
    activation = tokens * hidden * width
    gradients = 12 * hidden**2 * layers / (tp * pp) * width
    return {
        "tp": 4 * layers / pp * 2 * (tp - 1) / tp * activation,
        "pp": 2 * activation,
        "dp": 2 * (dp - 1) / dp * gradients,
    }
