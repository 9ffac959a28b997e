"""Step 6: four matrices a layer"""

STEP, HINT = 6, "traffic"


def traffic(layers, hidden, tokens, width, tp, pp, dp):
    activation = tokens * hidden * width
    gradients = 4 * hidden**2 * layers / (tp * pp) * width
    return {
        "tp": 4 * layers / pp * 2 * (tp - 1) / tp * activation,
        "pp": min(pp - 1, 2) * activation,
        "dp": 2 * (dp - 1) / dp * gradients,
    }
