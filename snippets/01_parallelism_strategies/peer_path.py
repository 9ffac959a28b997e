"""Shows whether writes between two GPUs stay below a PCIe switch or go through the processor.

Two GPUs below one PCIe switch can exchange data through the switch. If a bridge between them
has access control services (ACS), it may redirect the requests to the root complex. Linux
shows this setting. Each device has a folder inside the folder of the bridge above it, and
the file `config` has the registers of the device. The program needs root, because other users
can read only 64 bytes of `config`, and the registers of ACS are above 256.
"""

import itertools
import sys
import tempfile
from pathlib import Path

GPUS = ("0x0300", "0x0302")  # first digits of the classes of display and 3D controllers
NVIDIA, AMD = "0x10de", "0x1002"
ACS = 0x0D  # the number of the extended capability
# bits that send a request or its answer upwards: redirected requests, redirected completions,
# and the vector of the ports that a request must not use, as in drivers/pci/p2pdma.c
REDIRECTS = {0x04: "ReqRedir+", 0x08: "CmpltRedir+", 0x20: "EgressCtrl+"}


# --8<-- [start:acs]
def acs_control(config: bytes) -> int | None:
    """Return the ACS control register of a device, or None if the device has no ACS.

    Raises `PermissionError` if `config` ends before the extended capabilities.
    """
    if len(config) < 256:
        raise PermissionError("the registers are cut off: start this program as root")
    at, seen = 0x100, set()
    while 0x100 <= at <= len(config) - 8 and at not in seen:  # no list without PCIe
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == ACS:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = header >> 20 & 0xFFC  # 0 is the end of the list
    return None


def redirects(bridge: Path) -> list[str]:
    """The names of the bits that make a bridge send requests of its devices upwards."""
    control = acs_control((bridge / "config").read_bytes()) or 0
    return [name for bit, name in REDIRECTS.items() if control & bit]


# --8<-- [end:acs]


# --8<-- [start:path]
def crossed(one: Path, other: Path) -> tuple[list[Path], bool]:
    """Return the bridges between two devices, and whether the path crosses the processor."""
    common = next(folder for folder in one.parents if folder in other.parents)
    ports = [
        folder for end in (one, other)
        for folder in itertools.takewhile(lambda each: each != common, end.parents)
    ]  # fmt: skip
    bridges = [port for port in ports if (port / "config").exists()]  # no host folder
    return bridges, not (common / "config").exists()


def say(devices: Path) -> int:
    """Print the path between any two GPUs. Return the number of paths that are redirected."""
    real = [each.resolve() for each in sorted(devices.iterdir())]
    gpus = [
        each for each in real
        if (each / "class").read_text().startswith(GPUS)
        and (each / "vendor").read_text().strip() in (NVIDIA, AMD)
    ]  # fmt: skip
    for gpu in gpus:
        kind = gpu / "iommu_group/type"
        print(f"{gpu.name}: IOMMU {kind.read_text().strip() if kind.exists() else 'absent'}")
    number = 0
    for one, other in itertools.combinations(gpus, 2):
        bridges, over_processor = crossed(one, other)
        within = [] if over_processor else bridges
        sent_up = {each.name: bits for each in within if (bits := redirects(each))}
        way = "over the processor" if over_processor else "below one switch"
        print(f"{one.name} to {other.name}: {way}, by {len(bridges)} ports")
        for name, bits in sent_up.items():
            print(f"  {name} sends them up: {' '.join(bits)}")
        number += bool(sent_up)
    return number


# --8<-- [end:path]


def play(folder: Path, control: int) -> Path:
    """Write the folders of two GPUs below one switch and a third GPU at a second processor."""
    top = folder / "pci0000:00/0000:00:01.0/0000:01:00.0"  # the upper port of the switch
    ports = [top / "0000:02:00.0", top / "0000:02:01.0"]
    far = folder / "pci0000:80/0000:80:01.0"
    gpus = [ports[0] / "0000:03:00.0", ports[1] / "0000:04:00.0", far / "0000:81:00.0"]
    (folder / "devices").mkdir()
    for each in [top.parent, top, *ports, far, *gpus]:
        each.mkdir(parents=True)
        (each / "class").write_text("0x030200\n" if each in gpus else "0x060400\n")
        (each / "vendor").write_text(f"{NVIDIA}\n" if each in gpus else "0x1000\n")
        registers = bytearray(4096)
        # a different capability comes first, and contains the address of the next one
        registers[0x100:0x104] = (0x148 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")
        if each in ports:
            registers[0x148:0x14C] = (1 << 16 | ACS).to_bytes(4, "little")
            registers[0x14E:0x150] = control.to_bytes(2, "little")
        (each / "config").write_bytes(registers)
        (folder / "devices" / each.name).symlink_to(each)
    for gpu in gpus:
        (gpu / "iommu_group").mkdir()
        (gpu / "iommu_group/type").write_text("DMA-FQ\n" if control else "identity\n")
    return folder / "devices"


def main() -> None:
    if sys.argv[1:] == ["--here"]:
        try:
            sys.exit(say(Path("/sys/bus/pci/devices")) > 0)
        except OSError as error:
            sys.exit(f"peer_path.py: {error}")
    for control, name in {0x04: "ReqRedir+", 0x08: "CmpltRedir+", 0x20: "EgressCtrl+"}.items():
        with tempfile.TemporaryDirectory() as folder:
            play(Path(folder), control)  # only one bit is set
            port = next(Path(folder).glob("**/0000:02:00.0"))
            assert redirects(port) == [name]
            # a user without root can read only the first 64 bytes
            (port / "config").write_bytes((port / "config").read_bytes()[:64])
            try:
                redirects(port)
            except PermissionError:
                continue
            raise AssertionError("64 bytes do not contain the registers of ACS")
    for what, control in {"ACS on": 0x1D, "ACS off": 0}.items():
        with tempfile.TemporaryDirectory() as folder:
            print(what)
            redirected = say(play(Path(folder).resolve(), control))
        assert redirected == (1 if control else 0)


if __name__ == "__main__":
    main()
