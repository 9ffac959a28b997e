"""Step 6: the gradients of the whole model"""

STEP, HINT = 6, "dp_whole"


def traffic(layers, hidden, tokens, width, tp, pp, dp):
    activation = tokens * hidden * width
    gradients = 12 * hidden**2 * layers * width
    return {
        "tp": 4 * layers / pp * 2 * (tp - 1) / tp * activation,
        "pp": min(pp - 1, 2) * activation,
        "dp": 2 * (dp - 1) / dp * gradients,
    }
