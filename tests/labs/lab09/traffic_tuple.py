"""Step 6: a tuple"""

STEP, HINT = 6, "traffic_keys"


def traffic(layers, hidden, tokens, width, tp, pp, dp):
    activation = tokens * hidden * width
    gradients = 12 * hidden**2 * layers / (tp * pp) * width
    return activation, activation, gradients
