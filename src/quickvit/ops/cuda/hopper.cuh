// What NVIDIA's Hopper can do, as functions: barriers, copies of boxes, products, and some that C++ has no word for.
//
// CLUSTER is as in the kernel. An address is one of shared memory.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// A tensor that is read in boxes.
struct __align__(64) Boxes {
    char descriptor[128];
};

// What the cache does with what comes again, and with what does not.
constexpr u64 KEEP = 0x14F0000000000000, PASS = 0x12F0000000000000;

__device__ __forceinline__ u32 shared(const void *pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\nretry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra retry;\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At the same place of another multiprocessor of the cluster.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A box of tokens for all multiprocessors of the cluster.
__device__ __forceinline__ void load_tokens(u32 target, const Boxes &x, u32 barrier, int channel, int row) {
#if CLUSTER > 1
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(target),
        "l"(&x), "r"(barrier), "r"(channel), "r"(row), "h"((unsigned short)((1 << CLUSTER) - 1)), "l"(KEEP)
        : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
        "l"(&x), "r"(barrier), "r"(channel), "r"(row), "l"(KEEP)
        : "memory");
#endif
}

// To the cache only.
__device__ __forceinline__ void fetch_tokens(const Boxes &x, int channel, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&x), "r"(channel), "r"(row)
                 : "memory");
}

// A box of weights of five axes, of which a group of columns has those between, in one or in two copies.
__device__ __forceinline__ void load_weights(
    u32 target, const Boxes &weight, u32 barrier, int channel, int copy, int group
) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target),
        "l"(&weight), "r"(barrier), "r"(channel), "r"(0), "r"(0), "r"(copy), "r"(group)
        : "memory");
}

// Of the registers that other warps do without.
template <int COUNT>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// What a product reads at an address: the two halves of its description, for rows of so many channels.
__device__ __forceinline__ u32 operand(u32 address) {
    return address / 16 | 1 << 16;
}

__device__ constexpr u32 upper(int channels) {
    return 8 * 2 * channels / 16 | (channels == 64 ? 1u : 2u) << 30;
}

__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The compiler must not move what is done with a total to before its products have ended.
template <int SIZE>
__device__ __forceinline__ void hold(float (&total)[SIZE]) {
#pragma unroll
    for (int i = 0; i < SIZE; i++) asm volatile("" : "+f"(total[i])::"memory");
}

// ------------------------------------------------------------------ two entries of float16 in a register

__device__ __forceinline__ u32 pack_2(float left, float right) {
    u32 pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(right), "f"(left));
    return pair;
}

__device__ __forceinline__ u32 both(float value) {
    return pack_2(value, value);
}

__device__ __forceinline__ u32 add_2(u32 a, u32 b) {
    u32 sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
}

__device__ __forceinline__ u32 sub_2(u32 a, u32 b) {
    u32 difference;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

__device__ __forceinline__ u32 mul_2(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ u32 fma_2(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// Of what is no number both are none.
__device__ __forceinline__ u32 min_2(u32 a, u32 b) {
    u32 result;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ u32 max_2(u32 a, u32 b) {
    u32 result;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

__device__ __forceinline__ float2 unpack_2(u32 pair) {
    float2 value;
    asm("{\n.reg .b16 left, right;\nmov.b32 {left, right}, %2;\ncvt.f32.f16 %0, left;\ncvt.f32.f16 %1, right;\n}"
        : "=f"(value.x), "=f"(value.y)
        : "r"(pair));
    return value;
}

__device__ __forceinline__ u32 tanh_2(u32 x) {
    u32 result;
    asm("tanh.approx.f16x2 %0, %1;" : "=r"(result) : "r"(x));
    return result;
}

// ------------------------------------------------------------------ two entries of bfloat16

__device__ __forceinline__ u32 pack(float left, float right) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(right), "f"(left));
    return pair;
}

__device__ __forceinline__ float2 unpack(u32 pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
}

__device__ __forceinline__ u32 to_bfloat(u32 pair) {
    const float2 value = unpack_2(pair);
    return pack(value.x, value.y);
}

// Eight or four entries, which come and go only once.
__device__ __forceinline__ void load_global(u32 (&run)[4], const u16 *place) {
    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(run[0]), "=r"(run[1]), "=r"(run[2]), "=r"(run[3])
                 : "l"(place), "l"(PASS)
                 : "memory");
}

__device__ __forceinline__ void load_global(u32 (&run)[2], const u16 *place) {
    asm volatile("ld.global.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
                 : "=r"(run[0]), "=r"(run[1])
                 : "l"(place), "l"(PASS)
                 : "memory");
}

__device__ __forceinline__ void store_global(u16 *place, const u32 (&run)[4]) {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(place), "r"(run[0]), "r"(run[1]),
                 "r"(run[2]), "r"(run[3]), "l"(PASS)
                 : "memory");
}

__device__ __forceinline__ void store_global(u16 *place, const u32 (&run)[2]) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(place), "r"(run[0]), "r"(run[1]), "l"(PASS)
                 : "memory");
}
