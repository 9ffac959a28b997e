"""Step 6: a message for each layer"""

STEP, HINT = 6, "pp_layers"


def traffic(layers, hidden, tokens, width, tp, pp, dp):
    activation = tokens * hidden * width
    gradients = 12 * hidden**2 * layers / (tp * pp) * width
    return {
        "tp": 4 * layers / pp * 2 * (tp - 1) / tp * activation,
        "pp": min(pp - 1, 2) * activation * layers / pp,
        "dp": 2 * (dp - 1) / dp * gradients,
    }
