"""Step 2: the address in place of the name"""

import ipaddress

STEP, HINT = 2, "socket_address"


def socket_variables(interfaces, peer):
    networks = {name: ipaddress.ip_interface(text).network for name, text in interfaces.items()}
    leads = [name for name, net in networks.items() if ipaddress.ip_address(peer) in net]
    if not leads:
        raise LookupError(peer)
    name = max(leads, key=lambda name: networks[name].prefixlen)
    name = interfaces[name].split("/")[0]
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
