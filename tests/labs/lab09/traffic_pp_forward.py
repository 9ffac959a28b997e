"""Step 6: no gradient goes back"""

STEP, HINT = 6, "pp_forward"


def traffic(layers, hidden, tokens, width, tp, pp, dp):
    activation = tokens * hidden * width
    gradients = 12 * hidden**2 * layers / (tp * pp) * width
    return {
        "tp": 4 * layers / pp * 2 * (tp - 1) / tp * activation,
        "pp": activation if pp > 1 else 0,
        "dp": 2 * (dp - 1) / dp * gradients,
    }
