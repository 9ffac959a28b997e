"""Step 2: any name if none leads there"""

import ipaddress

STEP, HINT = 2, "socket_lookup"


def socket_variables(interfaces, peer):
    networks = {name: ipaddress.ip_interface(text).network for name, text in interfaces.items()}
    leads = [name for name, net in networks.items() if ipaddress.ip_address(peer) in net]
    name = max(leads or interfaces, key=lambda name: networks[name].prefixlen)
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
