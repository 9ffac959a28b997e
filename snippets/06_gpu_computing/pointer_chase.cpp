/* More loads in flight give more bytes per second, although no load becomes faster.

A pointer chase follows a chain of addresses. It cannot start the next load before the current
load has arrived, so its time per load is the latency of the memory that contains the chain. If
one loop follows k chains, it has k loads in flight. Little's law then predicts a throughput of
k cache lines per latency. Compare the columns `predicted` and `measured`.
*/

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

struct alignas(64) Line {  // one cache line
    uint32_t next;
};

/* One random cycle through all n lines, so that no prefetcher can guess the next line. */
std::vector<Line> ring(size_t n) {
    std::vector<uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), std::mt19937(0));
    std::vector<Line> lines(n);
    for (size_t i = 0; i < n; i++) lines[order[i]].next = order[(i + 1) % n];
    return lines;
}

uint32_t ended;  // the sum of the lines at which the chains of the last chase ended

// --8<-- [start:chase]
/* Nanoseconds per step of k chases that advance together, with k loads in flight. */
template <int k>
double chase(const std::vector<Line>& lines, int steps) {
    uint32_t at[k];
    for (int j = 0; j < k; j++) at[j] = uint32_t(lines.size() / k * j);
    double best = 1e30;
    for (int repeat = 0; repeat < 5; repeat++) {
        auto start = std::chrono::steady_clock::now();
        for (int s = 0; s < steps; s++)
            for (int j = 0; j < k; j++) at[j] = lines[at[j]].next;  // k independent loads
        std::chrono::duration<double, std::nano> t = std::chrono::steady_clock::now() - start;
        best = std::min(best, t.count() / steps);
    }
    ended = 0;
    for (int j = 0; j < k; j++) ended += at[j];  // or the compiler would drop the loads
    return best;
}
// --8<-- [end:chase]

/* Check that the ring is shuffled and that eight chases follow eight paths of 5 x 101 steps. */
bool eight_paths() {
    auto lines = ring(512);
    uint32_t in_order = 0, want = 0;
    for (uint32_t i = 0; i < 512; i++) in_order += lines[i].next == (i + 1) % 512;
    chase<8>(lines, 101);
    for (uint32_t j = 0; j < 8; j++) {
        uint32_t at = 64 * j;
        for (int s = 0; s < 505; s++) at = lines[at].next;
        want += at;
    }
    return in_order < 10 && ended == want;
}

int main() {
    if (!eight_paths()) {
        std::fprintf(stderr, "the chases do not follow eight shuffled paths\n");
        return 1;
    }
    std::puts("one chase: the latency of the level that holds the ring");
    for (size_t kib : {16, 512, 8192, 65536}) {
        auto lines = ring(kib * 1024 / sizeof(Line));
        std::printf("  %6zu KiB  ≈%.1f ns a load\n", kib, chase<1>(lines, 200000));
    }

    std::puts("k chases in 64 MiB: Little's law, k lines of 64 bytes per latency");
    auto lines = ring(65536 * 1024 / sizeof(Line));
    const int steps = 150000;
    double latency = chase<1>(lines, steps);
    double times[] = {latency, chase<2>(lines, steps), chase<4>(lines, steps),
                      chase<8>(lines, steps), chase<16>(lines, steps)};
    for (int i = 0; i < 5; i++) {
        int k = 1 << i;
        double predicted = k * 64 / latency, measured = k * 64 / times[i];
        if (k == 1 && predicted != measured) return 1;  // one chase is the latency itself
        std::printf("  k = %2d  predicted ≈%.2f GB/s, measured ≈%.2f GB/s\n", k, predicted,
                    measured);
    }
    if (times[3] / 8 > times[0] / 2) {
        std::fprintf(stderr, "eight chases are not twice as fast as one\n");
        return 1;
    }
    if (times[4] < times[0] / 4) {  // a step of sixteen loads still takes about one latency
        std::fprintf(stderr, "a step of sixteen chases takes less than a quarter latency\n");
        return 1;
    }
    std::puts("eight chases at once move more than twice the bytes of one: yes");
}
