/* Four resources of an SM limit how many blocks are resident, and the scarcest one decides.

The resources are warp slots, block slots, registers and shared memory. Look at the column
`limit`. The program compares our rules with NVIDIA's own calculator, cuda_occupancy.h of the
CUDA toolkit, for all combinations of a sweep. Neither needs a GPU.
*/

#include <algorithm>
#include <climits>
#include <cstdio>
#include <string_view>

#include <cuda_occupancy.h>

struct Sm {
    const char* name;
    int major, minor, warps, blocks;  // compute capability; slots for warps and blocks
    int shared, shared_per_block;  // bytes
};
constexpr int kRegisters = 65536, kReserved = 1024;  // the system reserves 1 KiB per block
constexpr Sm kSms[] = {{"9.0 (H100, H200)", 9, 0, 64, 32, 228 * 1024, 227 * 1024},
                       {"10.0 (B200)", 10, 0, 64, 32, 228 * 1024, 227 * 1024},
                       {"8.0 (A100)", 8, 0, 64, 32, 164 * 1024, 163 * 1024},
                       {"8.9 (RTX 4090)", 8, 9, 48, 24, 100 * 1024, 99 * 1024}};

constexpr bool one_block_may_take_all() {  // all but what the system reserves
    for (const Sm& sm : kSms)
        if (sm.shared_per_block != sm.shared - kReserved) return false;
    return true;
}
static_assert(one_block_may_take_all());

int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

// --8<-- [start:blocks]
/* Blocks resident on one SM, and which of the four limits decides. */
int blocks(const Sm& sm, int threads, int registers, int shared, const char** limit) {
    int warps = (threads + 31) / 32;
    int per_warp = round_up(registers * 32, 256);            // allocated in units of 256
    int warps_by_registers = kRegisters / 4 / per_warp * 4;  // the SM has four quarters
    int by_registers = warps_by_registers / warps;
    if (per_warp * round_up(warps, 4) > kRegisters) by_registers = 0;
    int by_shared = sm.shared / round_up(shared + kReserved, 128);
    if (shared > sm.shared_per_block) by_shared = 0;
    int by_warps = sm.warps / warps;

    int least = std::min({by_warps, sm.blocks, by_registers, by_shared});
    *limit = least == 0              ? "does not launch"
             : least == by_warps     ? "warps"
             : least == by_registers ? "registers"
             : least == by_shared    ? "shared memory"
                                     : "blocks";
    return least;
}
// --8<-- [end:blocks]

/* Blocks resident on one SM, as the toolkit's calculator returns it. */
int nvidia(const Sm& sm, int threads, int registers, int shared) {
    cudaOccDeviceProp device;
    device.computeMajor = sm.major;
    device.computeMinor = sm.minor;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiprocessor = sm.warps * 32;
    device.regsPerBlock = device.regsPerMultiprocessor = kRegisters;
    device.warpSize = 32;
    device.sharedMemPerBlock = 48 * 1024;
    device.sharedMemPerMultiprocessor = sm.shared;
    device.numSms = 1;
    device.sharedMemPerBlockOptin = sm.shared_per_block;
    device.reservedSharedMemPerBlock = kReserved;
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = INT_MAX;
    kernel.numRegs = registers;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = sm.shared_per_block;
    kernel.numBlockBarriers = 1;
    cudaOccDeviceState state;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads,
                                                shared) != CUDA_OCC_SUCCESS)
        return -1;
    return result.activeBlocksPerMultiprocessor;
}

void print_row(const Sm& sm, int threads, int registers, int shared) {
    const char* limit;
    int n = blocks(sm, threads, registers, shared, &limit);
    int warps = n * ((threads + 31) / 32);
    std::printf("  %7d  %9d  %8d  %7d  %5d  %8.1f%%  %s\n", threads, registers, shared, n,
                warps, 100.0 * warps / sm.warps, limit);
}

int main() {
    const int examples[][3] = {{32, 16, 0},    {128, 32, 0},       {256, 32, 0},
                               {256, 33, 0},   {256, 64, 0},       {256, 128, 0},
                               {256, 255, 0},  {768, 32, 0},       {1024, 32, 0},
                               {1024, 65, 0},  {256, 32, 4224},    {256, 32, 33 * 1024},
                               {128, 168, 99 * 1024}};
    const char* limit;
    const Sm& first = kSms[0];
    for (const Sm& sm : kSms) {
        std::printf("compute capability %s%s\n", sm.name,
                    &sm == &first ? "" : ": rows that differ");
        if (&sm == &first)
            std::puts("  threads  registers  shared B   blocks  warps  occupancy  limit");
        int rows = 0;
        for (auto [threads, registers, shared] : examples) {
            const char *here, *there;
            int n = blocks(sm, threads, registers, shared, &here);
            int m = blocks(first, threads, registers, shared, &there);
            bool same = n == m && sm.warps == first.warps && std::string_view(here) == there;
            if (&sm != &first && same) continue;
            print_row(sm, threads, registers, shared);
            rows++;
        }
        if (!rows) std::puts("  none");
    }
    int compared = 0;
    for (const Sm& sm : kSms)
        for (int threads = 1; threads <= 1024; threads += 31)
            for (int registers = 1; registers <= 255; registers += registers < 64 ? 1 : 3)
                for (int shared = 0; shared <= 232 * 1024; shared += 4000, compared++)
                    if (blocks(sm, threads, registers, shared, &limit) !=
                        nvidia(sm, threads, registers, shared)) {
                        std::fprintf(stderr, "differs: %s, %d threads, %d registers, %d B\n",
                                     sm.name, threads, registers, shared);
                        return 1;
                    }
    std::printf("compared with cuda_occupancy.h: %d configurations, all equal\n", compared);
}
