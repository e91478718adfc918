// What hopper.cuh has, on a CPU: the threads of one cluster are fibers, which run in a random order.
//
// Loads come some time later, and products read their operands as late as they may, so that what is given free too
// early is seen. Where nobody can go on the run ends: a deadlock.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <ucontext.h>
#include <vector>

typedef uint32_t u32;
typedef uint64_t u64;
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n)
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define __shared__

typedef uint16_t u16;

// A tensor of five axes, the last of which are long.
struct Boxes {
    const u16 *data;
    long long strides[5];
    int sizes[5], box[5];
};

struct Place {
    u32 x;
};

struct float2 {
    float x, y;
};

struct Barrier {
    int count, pending, bytes, phase;
};

struct Warp {
    int arrived = 0, meeting = 0;
    u32 words[32];
};

struct Program {
    std::vector<unsigned char> memory;
    std::vector<Barrier> barriers;
    std::vector<Warp> warps;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Program *program;
    Place thread, block;
    bool done = false;
    std::vector<std::vector<std::function<void()>>> groups;
    std::vector<std::function<void()>> group;
};

static std::vector<Fiber> fibers;
static std::vector<Program> programs;
static std::vector<std::function<void()>> loads;
static std::mt19937 chance;
static ucontext_t scheduler;
static Fiber *now;
static Place gridDim;
static int met;
static bool moved;
static std::string trouble;
static std::function<void()> entry;
char memory[1];
using std::min;

#define threadIdx now->thread
#define blockIdx now->block

static void let_others() {
    swapcontext(&now->context, &scheduler);
}

template <class Condition>
static void wait_until(Condition condition) {
    while (!condition()) let_others();
    moved = true;
}

// ------------------------------------------------------------------ barriers

static u32 shared(const void *) {
    return 0;
}

static Barrier &barrier_at(Program &program, u32 address) {
    return program.barriers.at(address / 8);
}

static void settle(Barrier &barrier) {
    if (barrier.pending || barrier.bytes) return;
    barrier.phase ^= 1, barrier.pending = barrier.count;
    moved = true;
}

static void arrive(Barrier &barrier) {
    if (!barrier.pending) throw std::logic_error("a barrier met more than it was made for");
    barrier.pending--;
    settle(barrier);
}

static void barrier_init(u32 address, u32 count) {
    barrier_at(*now->program, address) = {(int)count, (int)count, 0, 0};
}

static void barriers_are_ready() {}

static void barrier_wait(u32 address, u32 phase) {
    Barrier &barrier = barrier_at(*now->program, address);
    wait_until([&] { return barrier.phase != (int)phase; });
}

static void barrier_expect(u32 address, u32 bytes) {
    Barrier &barrier = barrier_at(*now->program, address);
    barrier.bytes += bytes;
    arrive(barrier);
}

static void barrier_arrive(u32 address) {
    arrive(barrier_at(*now->program, address));
}

static void barrier_arrive_at(u32 address, u32 rank) {
    arrive(barrier_at(programs.at(rank), address));
}

static void meet(int &arrived, int &meeting, int count) {
    const int mine = meeting;
    if (++arrived == count) arrived = 0, meeting++;
    wait_until([&] { return meeting != mine; });
}

static void __syncwarp() {
    Warp &warp = now->program->warps.at(threadIdx.x / 32);
    meet(warp.arrived, warp.meeting, 32);
}

static int meetings;

static void cluster_meet() {
    meet(met, meetings, (int)fibers.size());
}

static void __syncthreads() {}

static int __shfl_sync(u32, int value, int lane) {
    Warp &warp = now->program->warps.at(threadIdx.x / 32);
    warp.words[threadIdx.x % 32] = value;
    __syncwarp();
    const int result = warp.words[lane];
    __syncwarp();
    return result;
}

template <int COUNT>
static void more_registers() {}
template <int COUNT>
static void fewer_registers() {}

// ------------------------------------------------------------------ boxes

static u32 swizzled(u32 address, int channels) {
    return address ^ (channels == 64 ? (address >> 7 & 7) << 4 : (address >> 7 & 3) << 4);
}

static void load_box(int rank, u32 target, const Boxes &from, u32 barrier, std::array<int, 5> corner) {
    Program &program = programs.at(rank);
    const int *box = from.box, count = box[0] * box[1] * box[2] * box[3] * box[4];
    for (int place = 0; place < count; place++) {
        bool inside = true;
        long long offset = 0;
        for (int axis = 4, rest = place; axis >= 0; rest /= box[axis--]) {
            const int at = corner[axis] + rest % box[axis];
            inside = inside && at < from.sizes[axis];
            offset += at * from.strides[axis];
        }
        const u16 value = inside ? from.data[offset] : 0;
        memcpy(&program.memory.at(swizzled(target + 2 * place, box[4])), &value, 2);
    }
    Barrier &full = barrier_at(program, barrier);
    full.bytes -= 2 * count;
    settle(full);
}

static void load_tokens(u32 target, const Boxes &x, u32 barrier, int channel, int row) {
    for (int rank = 0; rank < CLUSTER; rank++)
        loads.push_back([=] { load_box(rank, target, x, barrier, {0, 0, 0, row, channel}); });
}

static void fetch_tokens(const Boxes &, int, int) {}

static void load_weights(u32 target, const Boxes &weight, u32 barrier, int channel, int copy, int group) {
    const int rank = blockIdx.x % CLUSTER;
    loads.push_back([=] { load_box(rank, target, weight, barrier, {group, copy, 0, 0, channel}); });
}

// ------------------------------------------------------------------ products

static float from_half(u16 bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return value;
}

static u32 to_half(float value) {
    const _Float16 narrow = (_Float16)value;
    u16 bits;
    memcpy(&bits, &narrow, 2);
    return bits;
}

static float from_bfloat(u16 bits) {
    const u32 wide = (u32)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static u32 rounded(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16;
}

static u32 operand(u32 address) {
    return address / 16;
}

static constexpr u32 upper(int channels) {
    return channels;
}

static void products_begin() {}

static void products_commit() {
    now->groups.push_back(std::move(now->group));
    now->group.clear();
}

template <int LEFT>
static void products_wait() {
    for (; now->groups.size() > LEFT; now->groups.erase(now->groups.begin()))
        for (const auto &product : now->groups[0]) product();
    let_others();
    moved = true;
}

template <int SIZE>
static void hold(float (&)[SIZE]) {}

template <int WIDTH>
static void wgmma(float (&total)[WIDTH / 2], u32 left, u32 right, u32 channels, int more) {
    Program *program = now->program;
    const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16 + lane / 4;
    float *entries = total;
    now->group.push_back([=] {
        const auto at = [&](u32 operand, int row, int channel) {
            u16 bits;
            const u32 address = 16 * operand + row / 8 * 16 * channels + row % 8 * 2 * channels + 2 * channel;
            memcpy(&bits, &program->memory.at(swizzled(address, channels)), 2);
            return from_bfloat(bits);
        };
        for (int i = 0; i < WIDTH / 2; i++) {
            const int row = first + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
            float sum = more ? entries[i] : 0;
            for (int channel = 0; channel < 16; channel++) sum += at(left, row, channel) * at(right, column, channel);
            entries[i] = sum;
        }
    });
}

// ------------------------------------------------------------------ entries

static float half(u32 pair, int right) {
    return from_half(right ? pair >> 16 : pair);
}

static u32 pack_2(float left, float right) {
    const auto bounded = [](float value) { return value != value ? value : std::clamp(value, -65504.0f, 65504.0f); };
    return to_half(bounded(left)) | to_half(bounded(right)) << 16;
}

static u32 both(float value) {
    return pack_2(value, value);
}

// Sums and products of two numbers in float16 are exact enough in float to be rounded once.
template <class Operation>
static u32 each(Operation operation) {
    return to_half(operation(0)) | to_half(operation(1)) << 16;
}

static u32 add_2(u32 a, u32 b) {
    return each([=](int i) { return half(a, i) + half(b, i); });
}

static u32 sub_2(u32 a, u32 b) {
    return each([=](int i) { return half(a, i) - half(b, i); });
}

static u32 mul_2(u32 a, u32 b) {
    return each([=](int i) { return half(a, i) * half(b, i); });
}

static u32 fma_2(u32 a, u32 b, u32 c) {
    return each([=](int i) { return (double)half(a, i) * half(b, i) + half(c, i); });
}

static u32 min_2(u32 a, u32 b) {
    return each([=](int i) { return half(a, i) < half(b, i) ? half(a, i) : half(b, i); });
}

static u32 max_2(u32 a, u32 b) {
    return each([=](int i) { return half(a, i) > half(b, i) ? half(a, i) : half(b, i); });
}

static float2 unpack_2(u32 pair) {
    return {half(pair, 0), half(pair, 1)};
}

static u32 tanh_2(u32 x) {
    return each([=](int i) { return std::tanh(half(x, i)); });
}

static u32 to_bfloat(u32 pair) {
    return rounded(half(pair, 0)) | rounded(half(pair, 1)) << 16;
}

static u32 pack(float left, float right) {
    return rounded(left) | rounded(right) << 16;
}

static float2 unpack(u32 pair) {
    return {from_bfloat(pair), from_bfloat(pair >> 16)};
}

template <int PAIRS>
static void load_global(u32 (&run)[PAIRS], const u16 *place) {
    memcpy(run, place, sizeof run);
}

template <int PAIRS>
static void store_global(u16 *place, const u32 (&run)[PAIRS]) {
    memcpy(place, run, sizeof run);
}

// ------------------------------------------------------------------ running

static void run_fiber() {
    try {
        entry();
    } catch (const std::exception &error) {
        trouble = error.what();
    }
    now->done = true;
    moved = true;
    swapcontext(&now->context, &scheduler);
}

// All programs of a grid, one cluster after the other. What went wrong, if anything did.
static const char *run(int grid, int threads, int bytes, unsigned seed, std::function<void()> kernel) {
    chance.seed(seed);
    trouble.clear();
    gridDim.x = grid, entry = kernel;
    for (int first = 0; first < grid; first += CLUSTER) {
        programs.assign(CLUSTER, {});
        fibers.clear();
        fibers.resize(CLUSTER * threads);
        met = meetings = 0;
        loads.clear();
        for (Program &program : programs) {
            program.memory.assign(bytes, 0xFF);
            program.barriers.assign(bytes / 8 + 1, {});
            program.warps.resize(threads / 32);
        }
        // Lanes of a warp run one after the other, warps in any order. Some are slow.
        std::vector<std::vector<Fiber *>> warps(CLUSTER * threads / 32);
        std::vector<bool> slow(warps.size());
        for (size_t i = 0; i < fibers.size(); i++) {
            Fiber &fiber = fibers[i];
            fiber.stack.resize(1 << 16);
            fiber.program = &programs[i / threads];
            fiber.thread.x = i % threads, fiber.block.x = first + i / threads;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            makecontext(&fiber.context, run_fiber, 0);
            warps[i / 32].push_back(&fiber);
        }
        std::vector<size_t> order(warps.size());
        for (size_t i = 0; i < order.size(); i++) order[i] = i, slow[i] = chance() % 3 == 0;
        bool all = true;
        for (size_t left = fibers.size(); left;) {
            moved = false;
            std::shuffle(order.begin(), order.end(), chance);
            for (size_t warp : order) {
                if (slow[warp] && !all && chance() % 16) continue;
                for (Fiber *fiber : warps[warp]) {
                    if (fiber->done) continue;
                    now = fiber;
                    swapcontext(&scheduler, &fiber->context);
                    left -= fiber->done;
                }
            }
            std::shuffle(loads.begin(), loads.end(), chance);
            for (size_t count = std::min<size_t>(chance() % 4, loads.size()); count; count--) {
                const auto load = loads.back();
                loads.pop_back();
                load();
                moved = true;
            }
            if (!moved && all && loads.empty()) trouble = "nobody can go on: the kernel waits for ever";
            if (!trouble.empty()) return trouble.c_str();
            all = !moved;
        }
    }
    return nullptr;
}
