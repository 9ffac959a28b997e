"""Step 2: the first that is not the loopback"""

STEP, HINT = 2, "socket_first"


def socket_variables(interfaces, peer):
    name = [*(name for name in interfaces if name != "lo"), "lo"][0]
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
