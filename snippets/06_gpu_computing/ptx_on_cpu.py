"""Runs the PTX of a kernel without loops on a CPU, all threads of a block in step.

PTX is the assembly language that NVIDIA's compilers write. Some languages have no interpreter,
but their compilers need no GPU. So the PTX of such a kernel can be run here, with NumPy, one
instruction after the other. A jump may only go forward: its threads skip the instructions up to
the label. Every access must be aligned and inside of a buffer, shared memory must be written
before it is read, and all threads must reach a barrier.

The program runs a small kernel, and then versions with a fault, which it reports. What
ptxas makes of the PTX, races between two barriers, and speed are not checked.
"""

import re

import numpy as np

U32, U64 = np.uint32, np.uint64
SHARED = 16384  # bytes of shared memory
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def statements(ptx: str) -> list[str]:
    """Return the labels and instructions of the first kernel, without comments."""
    body = ptx[ptx.index(".entry") :]
    body = re.sub(r"//.*", "", body[body.index("\n{") : body.index("\n}")])
    body = re.sub(r"^\s*\.(?:loc|reg|shared|pragma).*", "", body, flags=re.M)
    body = re.sub(r"^\s*[{}]\s*$", "", re.sub(r"(\$\w+):", r"\1;", body), flags=re.M)
    return [line for part in body.split(";") if (line := " ".join(part.split()))]


def down(exact: np.ndarray) -> np.ndarray:
    """Round float64 to float32, toward minus infinity."""
    near = exact.astype(np.float32)
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)


# --8<-- [start:block]
class Block:
    """One block of threads: their registers, shared memory, and the buffers of the kernel."""

    def __init__(self, number: int, threads: int, params: list[int], buffers: dict) -> None:
        thread = np.arange(threads, dtype=U64)
        self.params, self.buffers = params, buffers  # the buffers by address
        self.registers = {
            "%tid.x": thread,
            "%laneid": thread % U64(32),
            "%ctaid.x": np.full(threads, number, U64),
        }
        self.shared = np.zeros(SHARED // 4, U32)
        self.written = np.zeros(SHARED // 4, bool)
        self.skip_to: list[str | None] = [None] * threads  # the label of a thread that jumped
        self.threads = threads

    def run(self, code: list[str]) -> None:
        """Execute every statement for the threads that did not jump over it."""
        for statement in code:
            if statement.startswith("$"):
                self.skip_to = [None if to == statement else to for to in self.skip_to]
                continue
            active = np.array([to is None for to in self.skip_to])
            guard, statement = re.fullmatch(r"(?:@(!?%p\d+) )?(.*)", statement).groups()
            if guard:
                active &= (self.value(guard.strip("!")) != 0) ^ guard.startswith("!")
            if active.any():
                self.execute(statement, active)
        assert not any(self.skip_to), "no label follows the jump"

    # --8<-- [end:block]
    def value(self, name: str) -> np.ndarray:
        """The 64 bits of an operand for every thread: a register, a constant or an address."""
        if name.startswith("%"):
            return self.registers[name]
        if name.startswith("0f"):
            bits = int(name[2:], 16)
        else:  # the names of shared memory are address 0
            bits = int(name, 0) if re.fullmatch(r"-?\d\w*", name) else 0
        return np.full(self.threads, bits & (1 << 64) - 1, U64)

    def place(self, operand: str) -> np.ndarray:
        """The addresses of an operand such as [%rd1+16]."""
        base, _, offset = operand.strip("[] ").partition("+")
        return (self.value(base.strip()) + U64(int(offset or 0))).astype(np.int64)

    def words(self, shared: bool, address: int, size: int) -> tuple[np.ndarray, int]:
        """The memory and the index of its word at an address; checks alignment and bounds."""
        assert address % size == 0, f"an access of {size} bytes at {address} is not aligned"
        if shared:
            assert 0 <= address < SHARED
            return self.shared, address // 4
        for start, buffer in self.buffers.items():
            if start <= address and address + size <= start + 4 * buffer.size:
                return buffer, (address - start) // 4
        raise AssertionError(f"{size} bytes at {address} are in no buffer")

    def execute(self, statement: str, active: np.ndarray) -> None:
        """Execute one instruction for the active threads."""
        opcode, _, rest = statement.partition(" ")
        name, *kinds = opcode.split(".")
        operands = [x.strip(" {}") for x in re.split(r",(?![^{\[]*[}\]])", rest)]
        if name in ("ld", "st"):
            self.access(name, kinds, operands, active)
        elif name == "bra":
            self.skip_to = [
                operands[-1] if jumps else to
                for jumps, to in zip(active, self.skip_to, strict=True)
            ]
        elif name == "bar":
            assert active.all(), "not every thread reaches the barrier"
        elif name == "shfl":
            warps = active.reshape(-1, 32)
            assert (warps.all(1) | ~warps.any(1)).all(), "a shuffle needs all lanes of a warp"
            lane, other = np.arange(self.threads), self.value(operands[2]).astype(np.int64)
            source = lane ^ other if "bfly" in kinds else lane // 32 * 32 + other
            self.set(operands[0].split("|")[0], self.value(operands[1])[source], active)
        elif name not in ("ret", "exit"):
            self.set(operands[0], self.compute(name, kinds, operands[1:]), active)

    def access(self, name: str, kinds: list, operands: list, active: np.ndarray) -> None:
        """Load or store 1, 2 or 4 words of 32 bits per thread, or load a parameter."""
        if "param" in kinds:
            index = int(re.search(r"param_(\d+)", operands[1])[1])
            return self.set(operands[0], np.full(self.threads, self.params[index], U64), active)
        shared = any(kind.startswith("shared") for kind in kinds)
        registers, where = operands if name == "ld" else operands[::-1]
        registers, where = [x.strip() for x in registers.split(",")], self.place(where)
        for thread in np.flatnonzero(active):
            memory, at = self.words(shared, int(where[thread]), 4 * len(registers))
            for i, register in enumerate(registers):
                if name == "ld":
                    assert not shared or self.written[at + i], "no thread wrote this word"
                    self.registers.setdefault(register, np.zeros(self.threads, U64))
                    self.registers[register][thread] = memory[at + i]
                else:
                    memory[at + i] = U32(int(self.value(register)[thread]) & 0xFFFFFFFF)
                    if shared:
                        self.written[at + i] = True

    def set(self, name: str, value: np.ndarray, active: np.ndarray) -> None:
        old = self.registers.get(name, np.zeros(self.threads, U64))
        self.registers[name] = np.where(active, value, old)

    # --8<-- [start:compute]
    def compute(self, name: str, kinds: list[str], operands: list[str]) -> np.ndarray:
        """The 64 bits of the result of an arithmetic instruction, for every thread."""
        bits = [self.value(operand) for operand in operands]
        if name == "selp":
            return np.where(bits[2] != 0, bits[0], bits[1])
        if kinds[-1] == "f32" and name != "mov":
            with np.errstate(all="ignore"):
                result = floats(name, kinds, *(x.astype(U32).view(np.float32) for x in bits))
            if name == "setp":
                return result.astype(U64)
            return result.astype(np.float32).view(U32).astype(U64)
        # --8<-- [end:compute]
        signed, wide = kinds[-1].startswith("s"), "wide" in kinds
        if name == "cvt":  # from 32 bits to 64
            return bits[0].astype(np.int32).astype(np.int64).view(U64) if signed else bits[0]
        long = kinds[-1].endswith("64") or kinds[-1] == "pred"
        kind = {(0, 0): U32, (1, 0): np.int32, (0, 1): U64, (1, 1): np.int64}[signed, long]
        numbers = [x.view(np.int64).astype(kind) for x in bits]
        if wide:
            numbers = [x.astype(np.int64) for x in numbers]
        a, b, c = (*numbers, None, None)[:3]
        if name == "setp":
            return COMPARE[kinds[0]](a, b).astype(U64)
        with np.errstate(over="ignore"):
            result = {
                "mov": lambda: a, "cvta": lambda: a, "add": lambda: a + b, "sub": lambda: a - b,
                "mul": lambda: a * b, "mad": lambda: a * b + c, "and": lambda: a & b,
                "or": lambda: a | b, "xor": lambda: a ^ b, "shl": lambda: a << b.astype(kind),
                "shr": lambda: a >> b.astype(kind),
            }[name]()  # fmt: skip
        width = 64 if long or wide else 32
        return result.astype(np.int64).view(U64) & U64((1 << width) - 1)


# --8<-- [start:floats]
def floats(name: str, kinds: list[str], a, b=None, c=None) -> np.ndarray:
    """Compute with fp32 as PTX does. exp2 and the quotient are more exact than on a GPU."""
    if name == "fma":  # the product of two fp32 is exact in float64
        exact = a.astype(float) * b.astype(float) + c.astype(float)
        return down(exact) if "rm" in kinds else exact.astype(np.float32)
    if name == "max":
        return np.maximum(a, b) if "NaN" in kinds else np.fmax(a, b)
    if name == "cvt" and "sat" in kinds:
        return np.clip(a, np.float32(0), np.float32(1))
    if name == "setp":
        return COMPARE[kinds[0]](a, b)
    return {
        "add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b,
        "div": lambda: a / b, "neg": lambda: -a, "ex2": lambda: np.exp2(a),
    }[name]()  # fmt: skip


# --8<-- [end:floats]
def run_rows(ptx: str, x: np.ndarray, threads: int, more: tuple[int, ...] = ()) -> np.ndarray:
    """Run a kernel with the parameters x, y and `more` on rows x [rows, columns] in fp32."""
    source, result = x.reshape(-1).view(U32).copy(), np.full(x.size, 0x7FC00000, U32)  # NaN
    at, to = 1 << 20, 1 << 24
    code = statements(ptx)
    for row in range(len(x)):  # a block for each row
        Block(row, threads, [at, to, *more], {at: source, to: result}).run(code)
    assert (source.view(np.float32) == x.reshape(-1)).all(), "the kernel changed its input"
    return result.view(np.float32).reshape(x.shape)


REVERSE = """
.entry reverse(.param .u64 reverse_param_0, .param .u64 reverse_param_1)
{
    ld.param.b64 %rd1, [reverse_param_0];
    ld.param.b64 %rd2, [reverse_param_1];
    mov.u32 %r1, %tid.x;
    setp.lt.u32 %p1, %r1, 32;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    ld.global.b32 %r2, [%rd4];
    shl.b32 %r3, %r1, 2;
    st.shared.b32 [%r3], %r2;
    bar.sync 0;
    sub.s32 %r4, 63, %r1;
    shl.b32 %r5, %r4, 2;
    ld.shared.b32 %r6, [%r5];
    add.s64 %rd5, %rd2, %rd3;
    st.global.b32 [%rd5], %r6;
    ret;
}
"""
FAULTS = {  # what the faulty kernel does, and the change that makes the fault
    "half of the threads jump over the barrier": (
        "    bar.sync 0;",
        "    @%p1 bra $past;\n    bar.sync 0;\n$past:",
    ),
    "thread 0 reads the word after the last one": ("sub.s32 %r4, 63", "sub.s32 %r4, 64"),
    "a thread stores 16 bytes at a multiple of 4": (
        "st.global.b32 [%rd5], %r6",
        "st.global.v4.b32 [%rd5], {%r6, %r6, %r6, %r6}",
    ),
    "the last thread stores behind the result": (
        "st.global.b32 [%rd5], %r6",
        "st.global.b32 [%rd5+4], %r6",
    ),
    "the threads load what is in front of the input": ("add.s64 %rd4", "sub.s64 %rd4"),
    "a thread stores to the input": ("add.s64 %rd5, %rd2", "add.s64 %rd5, %rd1"),
    "a jump goes backward": (
        "    bar.sync 0;",
        "$again:\n    bar.sync 0;\n    @%p1 bra $again;",
    ),
}


def main() -> None:
    x = np.arange(64, dtype=np.float32)[None]
    assert (run_rows(REVERSE, x, 64)[0] == np.arange(63, -1, -1)).all()
    print("64 threads reverse 64 numbers in shared memory: the result is right")
    for fault, (old, new) in FAULTS.items():
        assert old in REVERSE
        try:
            run_rows(REVERSE.replace(old, new), x, 64)
        except AssertionError as error:
            print(f"{fault}: {error}")
        else:
            raise AssertionError(f"{fault}: this was not noticed")
    # rounding down and to nearest, and what becomes of a NaN
    one, less = np.float32(1), np.float32(-(2.0**-26))
    arrays = [np.array([x]) for x in (one, one, less)]
    assert floats("fma", ["rm", "f32"], *arrays)[0] < 1 == floats("fma", ["rn"], *arrays)[0]
    assert np.isnan(floats("max", ["NaN", "f32"], np.float32("nan"), one))
    assert floats("max", ["f32"], np.float32("nan"), one) == 1


if __name__ == "__main__":
    main()
