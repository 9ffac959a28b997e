"""Step 6: the all-reduces of forward alone"""

STEP, HINT = 6, "tp_forward"


def traffic(layers, hidden, tokens, width, tp, pp, dp):
    activation = tokens * hidden * width
    gradients = 12 * hidden**2 * layers / (tp * pp) * width
    return {
        "tp": 2 * layers / pp * 2 * (tp - 1) / tp * activation,
        "pp": min(pp - 1, 2) * activation,
        "dp": 2 * (dp - 1) / dp * gradients,
    }
