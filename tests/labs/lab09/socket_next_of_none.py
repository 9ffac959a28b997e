"""Step 2: if none leads to the peer, next() has its say"""

import ipaddress

STEP, HINT = 2, "socket_lookup"


def socket_variables(interfaces, peer):
    networks = {name: ipaddress.ip_interface(text).network for name, text in interfaces.items()}
    longest = sorted(networks, key=lambda name: -networks[name].prefixlen)
    name = next(name for name in longest if ipaddress.ip_address(peer) in networks[name])
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
