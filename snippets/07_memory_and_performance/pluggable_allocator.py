"""Replace PyTorch's allocator: two C functions in a library, for CUDAPluggableAllocator.

The functions count calls and bytes. With CUDA they wrap cudaMallocAsync and become PyTorch's
allocator. Without CUDA they wrap malloc, and the program calls them with the same arguments.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = r"""
#include <cstddef>
#ifdef WITH_CUDA
#include <cuda_runtime_api.h>
#else
#include <cstdlib>
typedef void* cudaStream_t;
static int cudaMallocAsync(void** p, size_t n, cudaStream_t) { *p = malloc(n); return 0; }
static int cudaFreeAsync(void* p, cudaStream_t) { free(p); return 0; }
#endif

static long long calls = 0, live = 0;

extern "C" void* my_malloc(size_t size, int device, cudaStream_t stream) {
    void* p = nullptr;
    if (cudaMallocAsync(&p, size, stream) != 0) return nullptr;
    ++calls;
    live += size;
    return p;
}

extern "C" void my_free(void* p, size_t size, int device, cudaStream_t stream) {
    live -= size;
    cudaFreeAsync(p, stream);
}

extern "C" long long my_calls() { return calls; }
extern "C" long long my_live() { return live; }
"""


def build(folder: Path, cuda: bool) -> Path:
    """Compile the library. With CUDA this needs the headers and the runtime of the toolkit."""
    (folder / "my.cpp").write_text(SOURCE)
    command = ["c++", "-O1", "-shared", "-fPIC", "my.cpp", "-o", "my.so"]
    if cuda:
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        command += ["-DWITH_CUDA", f"-I{home}/include", f"-L{home}/lib64", "-lcudart"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "my.so"


def main() -> None:
    cuda = torch.cuda.is_available()
    folder = Path(tempfile.mkdtemp())
    try:
        path = build(folder, cuda)
    except (OSError, subprocess.CalledProcessError):
        sys.exit("this program needs a C++ compiler called c++, and with CUDA its toolkit")
    library = ctypes.CDLL(str(path))
    library.my_calls.restype = library.my_live.restype = ctypes.c_longlong
    sizes = [1, 600_000, 3_000_000] * 2
    if cuda:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "my_malloc", "my_free")
        torch.cuda.memory.change_current_allocator(allocator)  # before the first CUDA tensor
        for size in sizes:
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            del tensor
    else:
        library.my_malloc.restype = ctypes.c_void_p
        library.my_malloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        library.my_free.argtypes = [ctypes.c_void_p, *library.my_malloc.argtypes]
        pointers = set()
        for size in sizes:
            pointer = library.my_malloc(size, 0, None)
            ctypes.memset(pointer, 0, size)  # the memory can be written
            pointers.add(pointer)
            library.my_free(pointer, size, 0, None)
        assert len(pointers) < len(sizes), "no address was used again"
    print(f"{len(sizes)} tensors of {len(set(sizes))} sizes, one after another")
    print(f"calls of my_malloc: {library.my_calls()}, bytes live: {library.my_live()}")
    assert library.my_calls() == len(sizes)
    assert library.my_live() == 0
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
