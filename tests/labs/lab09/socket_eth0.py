"""Step 2: always eth0"""

STEP, HINT = 2, "socket_fixed"


def socket_variables(interfaces, peer):
    name = "eth0"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
