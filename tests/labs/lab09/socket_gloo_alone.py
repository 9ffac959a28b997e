"""Step 2: gloo's variable alone"""

import ipaddress

STEP, HINT = 2, "socket_both"


def socket_variables(interfaces, peer):
    networks = {name: ipaddress.ip_interface(text).network for name, text in interfaces.items()}
    leads = [name for name, net in networks.items() if ipaddress.ip_address(peer) in net]
    if not leads:
        raise LookupError(peer)
    return {"GLOO_SOCKET_IFNAME": max(leads, key=lambda name: networks[name].prefixlen)}
