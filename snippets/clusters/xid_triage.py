"""Reads kernel log lines with Xid errors and prints which action each GPU and node needs.

The table is the column "immediate action" of NVIDIA's Xid catalog, for the Xids that training
clusters meet. Two of its entries depend on what else was reported: Xid 45 is a
consequence if the same node reported another Xid, and Xid 48 is stricter together with 63 or 64
of the same GPU. Xid 154 is different: the driver itself writes the action into the message.

    python xid_triage.py                  the sample lines below, which are made up
    python xid_triage.py /var/log/kern.log
    dmesg | python xid_triage.py -

https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
"""

import itertools
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# from the mildest to the strictest
ACTIONS = [
    "nothing now",
    "restart the application",
    "reset the GPU",
    "drain the node, reset its GPUs",
    "reboot the node",
]
NOTHING, RESTART, RESET, DRAIN, REBOOT = range(5)

# --8<-- [start:table]
APPLICATION, HARDWARE = "application error", "hardware error"
FIRMWARE, CONSEQUENCE = "firmware error", "consequence"
TABLE = {  # Xid: (action, kind, NVIDIA's description)
    13: (RESTART, APPLICATION, "graphics engine exception"),
    31: (RESTART, APPLICATION, "GPU memory page fault"),
    43: (NOTHING, CONSEQUENCE, "GPU stopped processing"),
    45: (NOTHING, CONSEQUENCE, "preemptive cleanup"),
    48: (RESET, HARDWARE, "double bit ECC error"),
    63: (NOTHING, HARDWARE, "row remapping recorded"),
    64: (RESET, HARDWARE, "row remapping failed"),
    74: (RESET, HARDWARE, "NVLink error"),
    79: (REBOOT, HARDWARE, "GPU has fallen off the bus"),
    92: (NOTHING, HARDWARE, "high single-bit ECC error rate"),
    94: (RESTART, HARDWARE, "contained memory error"),
    95: (RESET, HARDWARE, "uncontained memory error"),
    119: (RESET, FIRMWARE, "GSP RPC timeout"),
    120: (RESET, FIRMWARE, "GSP error"),
    140: (RESET, HARDWARE, "ECC unrecovered error"),
}
# --8<-- [end:table]
RECOVERY = {  # the words in Xid 154
    "None": NOTHING,
    "GPU Reset Required": RESET,
    "Drain P2P": DRAIN,
    "Drain and Reset": DRAIN,
    "Node Reboot Required": REBOOT,
}

XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(.*)")
HOST = re.compile(r"(\S+) kernel: ")  # as journald and syslog write it; dmesg does not
RECOVERY_ACTION = re.compile(r"to 0x\d+ \(([^)]+)\)")


NVLINK5 = range(144, 151)  # their action depends on registers in the message

Gpu = tuple[str, str]  # node, PCI address


@dataclass
class Verdict:
    action: int = NOTHING  # index in ACTIONS
    reasons: list[str] = field(default_factory=list)
    look_up: list[int] = field(default_factory=list)  # Xids for which the table has no action

    def __str__(self) -> str:
        numbers = ", ".join(f"Xid {number}" for number in sorted(set(self.look_up)))
        return ACTIONS[self.action] + (f"; LOOK UP {numbers}" if numbers else "")


def triage(lines: Iterable[str]) -> dict[Gpu, Verdict]:
    """What each GPU needs that reported an Xid."""
    events = defaultdict(list)
    for line in lines:
        if found := XID.search(line):
            host = HOST.search(line)
            node = host[1] if host else "this node"
            events[node, found[1].lower()].append((int(found[2]), found[3]))
    of_node = defaultdict(set)
    for (node, _), seen in events.items():
        of_node[node] |= {number for number, _ in seen}
    return {gpu: decide(seen, of_node[gpu[0]]) for gpu, seen in events.items()}


def decide(seen: list[tuple[int, str]], of_node: set[int]) -> Verdict:
    """The strictest action for one GPU, with a reason for each of its Xids.

    `of_node` contains the Xids of all GPUs of its node.
    """
    numbers = {number for number, _ in seen}
    verdict = Verdict()
    for number, message in sorted(set(seen)):
        if number == 154:  # the driver has decided
            words = RECOVERY_ACTION.search(message)
            action = RECOVERY.get(words[1] if words else "", NOTHING)
            reason = f"the driver requires: {words[1] if words else message}"
            if not words or words[1] not in RECOVERY:
                verdict.look_up.append(number)
        elif number in TABLE:
            action, kind, description = TABLE[number]
            reason = f"{kind}: {description}"
            if number == 45 and of_node == {45}:
                reason += ", alone on this node: restart the Fabric Manager"
            if number == 48 and numbers & {63, 64}:
                action = DRAIN
        else:
            action, reason = NOTHING, "not in this table"
            if number in NVLINK5:
                reason = "hardware error: NVLink 5, decode its registers"
            verdict.look_up.append(number)
        verdict.action = max(verdict.action, action)
        if (line := f"Xid {number}, {reason}") not in verdict.reasons:
            verdict.reasons.append(line)
    return verdict


# Made up for this program in the format of the driver's messages; no GPU has written them.
SAMPLE = """\
Nov 29 03:11:02 node07 kernel: NVRM: GPU at PCI:0000:3b:00: GPU-11111111-2222-3333-4444-555555555555
Nov 29 03:11:02 node07 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=4101, name=python, GPU has fallen off the bus.
Nov 29 03:11:02 node07 kernel: NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)
Nov 29 03:11:04 node07 kernel: NVRM: Xid (PCI:0000:5d:00): 45, pid=4102, name=python, Ch 00000008
Nov 29 04:20:31 node12 kernel: NVRM: Xid (PCI:0000:9b:00): 48, pid=7001, name=python, An uncorrectable double bit error (DBE) has been detected on GPU
Nov 29 04:20:31 node12 kernel: NVRM: Xid (PCI:0000:9b:00): 63, pid=7001, name=python, Row Remapper: New row marked for remapping, reset gpu to activate.
Nov 29 04:20:31 node12 kernel: NVRM: Xid (PCI:0000:9b:00): 45, pid=7001, name=python, Ch 00000008
Nov 29 04:20:33 node12 kernel: NVRM: Xid (PCI:0000:cb:00): 48, pid=7002, name=python, An uncorrectable double bit error (DBE) has been detected on GPU
Nov 29 05:02:10 node19 kernel: NVRM: Xid (PCI:0000:1a:00): 31, pid=9100, name=python, MMU Fault: ENGINE GRAPHICS faulted
Nov 29 05:02:10 node19 kernel: NVRM: Xid (PCI:0000:1a:00): 43, pid=9100, name=python, Ch 00000010
Nov 29 05:02:10 node19 kernel: NVRM: Xid (PCI:0000:1a:00): 43, pid=9100, name=python, Ch 00000010
Nov 29 06:40:00 node23 kernel: NVRM: Xid (PCI:0000:4d:00): 63, pid=501, name=python, Row Remapper: New row marked for remapping, reset gpu to activate.
Nov 29 06:40:00 node23 kernel: NVRM: Xid (PCI:0000:4d:00): 94, pid=501, name=python, Contained: SM (0x1). RST: No, D-RST: No
Nov 29 06:41:00 node23 kernel: NVRM: Xid (PCI:0000:ab:00): 999, pid=502, name=python, a number of the future
Nov 29 06:41:05 node23 kernel: NVRM: Xid (PCI:0000:ab:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)
Nov 29 06:41:05 node23 kernel: NVRM: Xid (PCI:0000:ab:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)
Nov 29 06:50:12 node31 kernel: NVRM: Xid (PCI:0000:5d:00): 45, pid=6001, name=python, Ch 00000008
Nov 29 06:41:30 node23 kernel: pcieport 0000:00:01.0: AER: Corrected error received: 0000:17:00.0
[ 5107.644336] NVRM: Xid (PCI:0000:03:00): 95, pid=1, name=python, Uncontained: LTC TAG (0x2). RST: Yes, D-RST: No
"""  # noqa: E501
EXPECTED = {  # read off NVIDIA's catalog by hand, for the sample
    ("node07", "0000:3b:00"): "reboot the node",
    ("node07", "0000:5d:00"): "nothing now",
    ("node12", "0000:9b:00"): "drain the node, reset its GPUs",
    ("node12", "0000:cb:00"): "reset the GPU",
    ("node19", "0000:1a:00"): "restart the application",
    ("node23", "0000:4d:00"): "restart the application",
    ("node23", "0000:ab:00"): "drain the node, reset its GPUs; LOOK UP Xid 149, Xid 999",
    ("node31", "0000:5d:00"): "nothing now",
    ("this node", "0000:03:00"): "reset the GPU",
}
ALONE = {  # also read off the catalog: action and kind of each Xid, if it is the only one
    ("nothing now", "consequence"): [43, 45],
    ("nothing now", "hardware error"): [63, 92],
    ("restart the application", "application error"): [13, 31],
    ("restart the application", "hardware error"): [94],
    ("reset the GPU", "hardware error"): [48, 64, 74, 95, 140],
    ("reset the GPU", "firmware error"): [119, 120],
    ("reboot the node", "hardware error"): [79],
}
BY_DRIVER = {  # the words in Xid 154
    "nothing now": ["None"],
    "reset the GPU": ["GPU Reset Required"],
    "drain the node, reset its GPUs": ["Drain P2P", "Drain and Reset"],
    "reboot the node": ["Node Reboot Required"],
}


def read_lines(name: str) -> Iterable[str]:
    """The lines of a file, or of the standard input for the name "-"."""
    return sys.stdin if name == "-" else Path(name).read_text("utf-8", "replace").splitlines()


def report(result: dict[Gpu, Verdict]) -> None:
    for node in sorted({node for node, _ in result}):
        mine = {bus: found for (host, bus), found in sorted(result.items()) if host == node}
        strictest = max(verdict.action for verdict in mine.values())
        look_up = [number for verdict in mine.values() for number in verdict.look_up]
        print(f"{node}: {Verdict(strictest, look_up=look_up)}")
        for bus, verdict in mine.items():
            print(f"  {bus}  {verdict}")
            for reason in verdict.reasons:
                print(f"      {reason}")


def verdict_of(rest: str) -> Verdict:
    """What one GPU needs after a line that ends with these words."""
    (verdict,) = triage([f"NVRM: Xid (PCI:0000:03:00): {rest}"]).values()
    return verdict


def check_sample() -> None:
    lines = SAMPLE.splitlines()
    result = triage(lines)
    assert {gpu: str(verdict) for gpu, verdict in result.items()} == EXPECTED
    assert triage(reversed(lines)) == result  # the order of the lines does not matter
    words = {gpu: " ".join(verdict.reasons) for gpu, verdict in result.items()}
    assert words["node19", "0000:1a:00"].count("Xid 43") == 1  # it came twice
    assert "alone" in words["node31", "0000:5d:00"]
    assert "alone" not in words["node07", "0000:5d:00"]  # its node has a GPU with Xid 79
    assert "alone" not in words["node12", "0000:9b:00"]
    assert triage(["kernel: pcieport: AER: Corrected error received"]) == {}
    # one GPU, although the lines do not write its address in the same way
    both = triage(["NVRM: Xid (PCI:0000:5D:00): 48, DBE", "NVRM: Xid (0000:5d:00): 64, failed"])
    assert {gpu: str(found) for gpu, found in both.items()} == {
        ("this node", "0000:5d:00"): "drain the node, reset its GPUs"
    }
    assert str(verdict_of("154, changed from 0x0 (None) to 0x9 (New)")) == (
        "nothing now; LOOK UP Xid 154"
    )
    for (action, kind), numbers in ALONE.items():
        for number in numbers:
            found = verdict_of(f"{number}, a message")
            assert str(found) == action and f"Xid {number}, {kind}: " in found.reasons[0]
    assert sorted(itertools.chain(*ALONE.values())) == sorted(TABLE)
    for action, decisions in BY_DRIVER.items():
        for decision in decisions:
            found = verdict_of(f"154, changed from 0x9 (Other) to 0x1 ({decision})")
            assert str(found) == action, decision
    for number in (143, 144, 150, 151):
        found = verdict_of(f"{number}, a message")
        assert str(found) == f"nothing now; LOOK UP Xid {number}"
        assert ("NVLink 5" in found.reasons[0]) == (144 <= number <= 150)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "kern.log")
        log.write_text(SAMPLE)
        assert triage(read_lines(str(log))) == result


def main() -> None:
    if len(sys.argv) == 1:
        check_sample()
        report(triage(SAMPLE.splitlines()))
    else:
        try:
            report(triage(read_lines(sys.argv[1])))
        except OSError as error:
            sys.exit(f"xid_triage.py cannot read {sys.argv[1]}: {error.strerror}")


if __name__ == "__main__":
    main()
