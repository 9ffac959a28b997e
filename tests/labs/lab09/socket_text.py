"""Step 2: the beginning of the address as text"""

STEP, HINT = 2, "socket_text"


def socket_variables(interfaces, peer):
    start = peer.rpartition(".")[0]
    found = [name for name, text in interfaces.items() if text.startswith(start)]
    name = (found + [name for name in interfaces if name != "lo"])[0]
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
