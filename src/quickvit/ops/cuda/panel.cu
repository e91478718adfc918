// A linear map with the weights at rest, then GELU or octets, on NVIDIA's Hopper; panel.py says what it does.
//
// Constants that are put before this file: M, F (eighths of both widths), OCTETS (1: q, k and v as octets, 0: GELU), ALONG
// (whether the two groups of warps that multiply have different tokens; else they have different columns), SLOTS (of boxes
// of tokens), CLUSTER, HALF (float16 in place of bfloat16), BIAS (0: none, 1: of the type of x, 2: float), SCALED (whether
// tokens have a factor), and the polynomial of GELU. What the hardware does is in hopper.cuh.

// Of x and of both weights, and of what is left of their irreps.
struct Maps {
    Boxes x, x_rest, one, one_rest, two, two_rest;
};

// Groups of four warps that multiply; columns of each block that one of them has, in eights.
constexpr int GROUPS = 2, N = 32, EIGHTS = N / 8;
// Tokens and columns of a tile.
constexpr int ROWS = ALONG ? 64 * GROUPS : 64, COLUMNS = ALONG ? N : N * GROUPS;
// Channels of a box: what is left of an irrep comes in a narrow one, to which more may belong.
constexpr int WIDE = 64, NARROW = 32;
static_assert(OCTETS || F % N == 0, "all columns of a group of warps are of one irrep");
static_assert(OCTETS || !HALF, "GELU rounds like bfloat16");

__device__ constexpr int turns_of(int channels) {
    return (channels + WIDE - 1) / WIDE;
}

// Bytes of so many rows of so many channels.
__device__ constexpr int bytes_of(int rows, int channels) {
    return 2 * rows * (channels / WIDE * WIDE + (channels % WIDE ? NARROW : 0));
}

// Whether a box of an irrep of so many channels is a wide one.
__device__ constexpr bool is_wide(int step, int channels) {
    return (step + 1) * WIDE <= channels;
}

// Boxes of an irrep of one dimension, of a component of E, and of a tile.
constexpr int TURNS_1 = turns_of(M), TURNS_2 = turns_of(2 * M), TURNS = 4 * TURNS_1 + 2 * TURNS_2;
// Bytes of a box of tokens, of the weights of an irrep, and of a panel.
constexpr int BOX = ROWS * WIDE * 2, IRREP_1 = bytes_of(COLUMNS, M), IRREP_2 = bytes_of(2 * COLUMNS, 2 * M);
constexpr int PANEL = 4 * IRREP_1 + IRREP_2;
// Boxes whose products the warps that multiply do not wait for.
constexpr int AHEAD = 2;
static_assert(TURNS_1 >= AHEAD, "the products of an irrep end while the next one is multiplied");

// ------------------------------------------------------------------ products

// A place in the ring of boxes of tokens.
struct Turn {
    u32 number, slot, phase;

    __device__ __forceinline__ explicit Turn(u32 number) : number(number), slot(number % SLOTS), phase(number / SLOTS & 1) {}

    __device__ __forceinline__ void operator++() {
        number++;
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

struct Ring {
    u32 boxes, full, empty;

    __device__ __forceinline__ void wait(const Turn &turn) const {
        barrier_wait(full + 8 * turn.slot, turn.phase);
    }

    // All multiprocessors of the cluster may load into this slot, as far as this warp is concerned.
    __device__ __forceinline__ void release(Turn &done) const {
        if (threadIdx.x % 32 < CLUSTER) barrier_arrive_at(empty + 8 * done.slot, threadIdx.x % 32);
        ++done;
    }
};

// What a group of warps has to do with the ring: it multiplies what came in one turn, and is done with an earlier one.
struct Work {
    Ring ring;
    Turn turn, done;
    int group;
};

// total = the tokens of some turns of an irrep times weights; the last products go on. What is to be done `meanwhile` has
// nothing to do with them.
template <int WIDTH, int CHANNELS, class Meanwhile>
__device__ __forceinline__ void multiply(
    float (&total)[WIDTH / 2], u32 weights, Work &work, int begin, int end, bool older, Meanwhile meanwhile
) {
#pragma unroll
    for (int step = begin; step < end; step++) {
        const bool wide = is_wide(step, CHANNELS);
        const int row = 2 * (wide ? WIDE : NARROW);
        // A box has the tokens of all groups, or the weights of all of them.
        const u32 mine = (ALONG ? 64 : WIDTH) * work.group * row;
        const u32 tokens = work.ring.boxes + work.turn.slot * BOX + (ALONG ? mine : 0);
        const u32 columns = weights + bytes_of(ALONG ? WIDTH : GROUPS * WIDTH, WIDE) * step + (ALONG ? 0 : mine);
        work.ring.wait(work.turn);
        products_begin();
        const u32 left = operand(tokens), right = operand(columns);
#pragma unroll
        for (int channel = 0; channel < WIDE; channel += 16)
            if (step * WIDE + channel < CHANNELS)
                wgmma<WIDTH>(total, left + channel / 8, right + channel / 8, upper(row / 2), step + channel > 0);
        products_commit();
        ++work.turn;
        meanwhile();
        if (older || step >= AHEAD) {
            products_wait<AHEAD>();
            work.ring.release(work.done);
        }
    }
}

// ------------------------------------------------------------------ what comes after products

// Of each eight columns of a product a thread has two neighbours in each of two rows: pairs, those of the first row first.
// Of a tile it has 16 entries for each of them, two by two: for GELU neighbours in each block, which are 16ths in float16,
// and as octets the blocks 2i and 2i + 1 of one of both, at 2i, and of the other at 2i + 1.
constexpr int PAIRS = 2 * EIGHTS;
using Tile = u32[8][PAIRS];

// Columns from a thread's first pair to the next, and from a thread to the next. For GELU the weights' columns come in such
// an order that all of a thread lie side by side.
constexpr int NEXT_PAIR = OCTETS ? 8 : 2, NEXT_THREAD = OCTETS ? 2 : 8;
constexpr float SIXTEENTH = 0.0625f;

// Two blocks of a tile, from products that have ended, times factors of both rows, plus a bias.
__device__ __forceinline__ void keep(
    Tile &tile, int two, const float *one, const float *other, const float (&factors)[2], const float (&shift)[2 * EIGHTS],
    bool biased
) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        const int row = pair / EIGHTS, eight = pair % EIGHTS;
        // Of two blocks, and of two neighbours.
        float v[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i / 2][i % 2] = (i / 2 ? other : one)[4 * eight + 2 * row + i % 2];
            if (SCALED) v[i / 2][i % 2] *= factors[row];
            if (biased && i < 2) v[0][i] += shift[2 * eight + i];
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            tile[2 * two + i][pair] = OCTETS ? pack(v[0][i], v[1][i]) : mul_2(pack_2(v[i][0], v[i][1]), both(SIXTEENTH));
    }
}

// u (1 + tanh(p(z) / 2)) for z = 4√2 u, of two entries: GELU(z) / 2√2.
__device__ __forceinline__ u32 gelu(u32 u) {
    return fma_2(u, tanh_2(mul_2(u, fma_2(mul_2(u, u), both(P1), both(P0)))), u);
}

// GELU through the regular domain: a sixteenth of x comes in float16, and y goes in bfloat16.
__device__ __forceinline__ void gelu_of_pair(Tile &v, int pair) {
    const u32 a = add_2(v[0][pair], v[1][pair]), b = sub_2(v[0][pair], v[1][pair]);
    const u32 c = add_2(v[2][pair], v[3][pair]), d = sub_2(v[2][pair], v[3][pair]);
    const u32 e = add_2(v[4][pair], v[6][pair]), f = sub_2(v[4][pair], v[6][pair]);
    const u32 g = add_2(v[5][pair], v[7][pair]), h = sub_2(v[5][pair], v[7][pair]);
    const u32 ac = add_2(a, c), a_c = sub_2(a, c), bd = add_2(b, d), b_d = sub_2(b, d);
    const u32 eh = add_2(e, h), e_h = sub_2(e, h), fg = add_2(f, g), f_g = sub_2(f, g);
    const u32 r0 = gelu(add_2(ac, eh)), r1 = gelu(add_2(a_c, f_g)), r2 = gelu(sub_2(ac, eh)), r3 = gelu(sub_2(a_c, f_g));
    const u32 r4 = gelu(sub_2(bd, fg)), r5 = gelu(sub_2(b_d, e_h)), r6 = gelu(add_2(bd, fg)), r7 = gelu(add_2(b_d, e_h));
    const u32 s = add_2(r0, r2), t = add_2(r1, r3), u = add_2(r6, r4), w = add_2(r7, r5);
    const u32 k = sub_2(r0, r2), l = sub_2(r1, r3), m = sub_2(r6, r4), n = sub_2(r7, r5);
    const u32 st = add_2(s, t), s_t = sub_2(s, t), uw = add_2(u, w), u_w = sub_2(u, w);
    const u32 kn = add_2(k, n), k_n = sub_2(k, n), ml = add_2(m, l), m_l = sub_2(m, l);
    v[0][pair] = to_bfloat(add_2(st, uw)), v[1][pair] = to_bfloat(sub_2(st, uw));
    v[2][pair] = to_bfloat(add_2(s_t, u_w)), v[3][pair] = to_bfloat(sub_2(s_t, u_w));
    v[4][pair] = to_bfloat(add_2(kn, ml)), v[5][pair] = to_bfloat(add_2(m_l, k_n));
    v[6][pair] = to_bfloat(sub_2(kn, ml)), v[7][pair] = to_bfloat(sub_2(m_l, k_n));
}

// What a thread has of the tile before this one, and where it goes.
struct Before {
    Tile tile;
    u16 *y;
    int tokens;
    // The first of both rows, and of the columns.
    int row, column;
    // Whether there is one.
    bool any;

    // What is to be done with it in one of the turns of a tile.
    __device__ __forceinline__ void part(int turn) {
        if (!any) return;
#pragma unroll
        for (int pair = PAIRS * turn / TURNS; pair < PAIRS * (turn + 1) / TURNS; pair++) {
            if (OCTETS)
                store_octets(pair);
            else {
                gelu_of_pair(tile, pair);
                if (pair % EIGHTS + 1 == EIGHTS) store_row(pair / EIGHTS);
            }
        }
    }

    // Eight columns of all blocks, of one of both rows.
    __device__ __forceinline__ void store_row(int which) {
        const int token = row + 8 * which;
        if (token >= tokens || column >= F) return;
        u16 *place = y + (long long)token * (8 * F) + column;
#pragma unroll
        for (int block = 0; block < 8; block++) {
            const u32 *v = tile[block] + which * EIGHTS;
            store_global(place + block * F, v[0], v[1], v[2], v[3]);
        }
    }

    // All blocks of two columns of q, k or v, which have M columns each.
    __device__ __forceinline__ void store_octets(int pair) {
        const int token = row + pair / EIGHTS * 8, first = column + pair % EIGHTS * NEXT_PAIR;
        if (token >= tokens || first >= F) return;
        u16 *place = y + 8 * (((long long)(first / M) * tokens + token) * M + first % M);
#pragma unroll
        for (int i = 0; i < 2; i++)
            store_global(place + 8 * i, tile[i][pair], tile[2 + i][pair], tile[4 + i][pair], tile[6 + i][pair]);
    }
};

// ------------------------------------------------------------------ the two kinds of warps

// This cluster's tiles: blocks of tokens, of one group of panels after the other.
struct Share {
    int first, last;

    __device__ __forceinline__ explicit Share(u32 tiles) {
        const u32 cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
        first = tiles * cluster / clusters;
        last = tiles * (cluster + 1) / clusters;
    }
};

// The boxes of an irrep of so many channels, the first of which is at `origin`.
template <int CHANNELS>
__device__ __forceinline__ void load_turns(
    const Boxes &wide, const Boxes &narrow, const Ring &ring, Turn &turn, int origin, int row, u32 rank
) {
    for (int step = 0; step < turns_of(CHANNELS); step++, ++turn) {
        const u32 full = ring.full + 8 * turn.slot;
        const bool whole = is_wide(step, CHANNELS);
        barrier_wait(ring.empty + 8 * turn.slot, turn.phase ^ 1);
        barrier_expect(full, whole ? BOX : BOX / WIDE * NARROW);
        // They take turns to load, each for all.
        if (turn.number % CLUSTER == rank) {
            const Boxes &boxes = whole ? wide : narrow;
            load_tokens(ring.boxes + turn.slot * BOX, boxes, full, origin + step * WIDE, row);
            // By the time of the next tile its box is near.
            fetch_tokens(boxes, origin + step * WIDE, row + ROWS);
        }
    }
}

// The weights of a panel for one of the irreps of one dimension, or for both copies of E, from a column on: N rows of each,
// of one group of warps after the other. Copies of octets are neighbours, as heads have them.
template <int CHANNELS, int COPIES>
__device__ __forceinline__ void load_irrep(
    u32 target, const Boxes &wide, const Boxes &narrow, u32 barrier, int irrep, int column
) {
    for (int step = 0; step < turns_of(CHANNELS); step++) {
        const bool whole = is_wide(step, CHANNELS);
        for (int columns = column; columns < column + COLUMNS; columns += N)
            for (int copy = 0; copy < COPIES; copy++) {
                const int row = irrep * F + columns, copied = OCTETS ? copy : 0, group = OCTETS ? 0 : (row + copy * F) / N;
                load_weights(target, whole ? wide : narrow, barrier, step * WIDE, copied, OCTETS ? row : 0, group);
                target += 2 * N * (whole ? WIDE : NARROW);
            }
    }
}

__device__ __forceinline__ void load(
    const Maps &maps, u32 weights, u32 weights_full, u32 weights_empty, const Ring &ring, int blocks, int tiles, u32 rank
) {
    const Share share(tiles);
    Turn turn(0);
    int panels = 0;
    for (int tile = share.first; tile < share.last; tile++) {
        const int row = tile % blocks * ROWS;
        if (tile == share.first || row == 0) {
            const int column = (tile / blocks * CLUSTER + rank) * COLUMNS;
            barrier_wait(weights_empty, panels++ & 1 ^ 1);
            barrier_expect(weights_full, PANEL);
            load_irrep<2 * M, 2>(weights, maps.two, maps.two_rest, weights_full, 0, column);
            for (int irrep = 0; irrep < 4; irrep++)
                load_irrep<M, 1>(
                    weights + IRREP_2 + irrep * IRREP_1, maps.one, maps.one_rest, weights_full, irrep, column
                );
        }
        for (int part = 0; part < 2; part++) {
            load_turns<2 * M>(maps.x, maps.x_rest, ring, turn, (4 + 2 * part) * M, row, rank);
            for (int irrep = 2 * part; irrep < 2 * part + 2; irrep++)
                load_turns<M>(maps.x, maps.x_rest, ring, turn, irrep * M, row, rank);
        }
    }
}

// The factor of a token, of which there may be none.
__device__ __forceinline__ float factor_of(const float *factors, int row, int tokens) {
    return row < tokens ? factors[row] : 0;
}

// The bias of this thread's columns.
__device__ __forceinline__ void load_bias(float (&shift)[2 * EIGHTS], const void *bias, int column) {
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        const int place = column + NEXT_PAIR * eight;
        float2 pair = {0, 0};
        if (BIAS && place < F) pair = BIAS == 1 ? unpack(((const u32 *)bias)[place / 2]) : ((const float2 *)bias)[place / 2];
        shift[2 * eight] = pair.x, shift[2 * eight + 1] = pair.y;
    }
}

__device__ __forceinline__ void compute(
    const void *bias, const float *factors, u16 *y, int tokens, u32 weights, u32 weights_full, u32 weights_empty,
    const Ring &ring, int blocks, int tiles, u32 rank, int group
) {
    const Share share(tiles);
    const u32 ones = weights + IRREP_2;
    const int lane = threadIdx.x % 32;
    // This thread's first row and column of a tile.
    const int line = (ALONG ? 64 * group : 0) + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int place = (ALONG ? 0 : N * group) + lane % 4 * NEXT_THREAD;
    Work work = {ring, Turn(0), Turn(0), group};
    Before before = {{}, y, tokens, 0, 0, false};
    float shift[2 * EIGHTS];
    int panels = 0;
    for (int tile = share.first; tile < share.last; tile++) {
        const int row = tile % blocks * ROWS + line, column = (tile / blocks * CLUSTER + rank) * COLUMNS + place;
        if (tile == share.first || tile % blocks == 0) {
            load_bias(shift, bias, column);
            barrier_wait(weights_full, panels++ & 1);
        }
        // Both copies of a component of E, and two irreps of one dimension.
        float component[N], irreps[2][N / 2], scale[2] = {};
        Tile now;
        if (SCALED) scale[0] = factor_of(factors, row, tokens), scale[1] = factor_of(factors, row + 8, tokens);
        // In turns: what was there before is kept once its products have ended, while the next ones go on, and meanwhile
        // there is something to do for the tile before.
        int turn = 0;
        const auto meanwhile = [&] { before.part(turn++); };
        const auto keep_irreps = [&](int part) {
            hold(irreps[0]), hold(irreps[1]);
            keep(now, part, irreps[0], irreps[1], scale, shift, BIAS && part == 0);
        };
#pragma unroll
        for (int part = 0; part < 2; part++) {
            const u32 first = ones + 2 * part * IRREP_1;
            multiply<2 * N, 2 * M>(component, weights, work, 0, AHEAD, part == 1, meanwhile);
            if (part == 1) keep_irreps(0);
            multiply<2 * N, 2 * M>(component, weights, work, AHEAD, TURNS_2, true, meanwhile);
            multiply<N, M>(irreps[0], first, work, 0, AHEAD, true, meanwhile);
            hold(component);
            keep(now, 2 + part, component, component + N / 2, scale, shift, false);
            multiply<N, M>(irreps[0], first, work, AHEAD, TURNS_1, true, meanwhile);
            multiply<N, M>(irreps[1], first + IRREP_1, work, 0, TURNS_1, true, meanwhile);
        }
        products_wait<0>();
        keep_irreps(1);
#pragma unroll
        for (int rest = 0; rest < AHEAD; rest++) work.ring.release(work.done);
        if ((tile + 1 == share.last || (tile + 1) % blocks == 0) && lane == 0) barrier_arrive(weights_empty);
#pragma unroll
        for (int i = 0; i < 8 * PAIRS; i++) before.tile[i / PAIRS][i % PAIRS] = now[i / PAIRS][i % PAIRS];
        before.row = row, before.column = column, before.any = true;
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) before.part(turn);
}

constexpr int THREADS = 128 * (GROUPS + 1);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    panel(const __grid_constant__ Maps maps, const void *bias, const float *factors, u16 *y, int tokens, int blocks, int tiles) {
    extern __shared__ __align__(1024) char memory[];
    const u32 weights = shared(memory), boxes = weights + PANEL, barriers = boxes + SLOTS * BOX;
    const Ring ring = {boxes, barriers, barriers + 8 * SLOTS};
    const u32 weights_full = barriers + 16 * SLOTS, weights_empty = weights_full + 8;
    const u32 rank = blockIdx.x % CLUSTER;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(ring.full + 8 * slot, 1);
            // All warps that multiply in each multiprocessor.
            barrier_init(ring.empty + 8 * slot, 4 * GROUPS * CLUSTER);
        }
        barrier_init(weights_full, 1);
        barrier_init(weights_empty, 4 * GROUPS);
        barriers_are_ready();
    }
    __syncthreads();
    cluster_meet();
    // The same in all threads of a warp, said so that the compiler sees it.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group < GROUPS) {
        more_registers<240>();
        compute(bias, factors, y, tokens, weights, weights_full, weights_empty, ring, blocks, tiles, rank, group);
    } else {
        fewer_registers<24>();
        if (threadIdx.x == 128 * GROUPS) load(maps, weights, weights_full, weights_empty, ring, blocks, tiles, rank);
        __syncwarp();
    }
    // Nobody goes while others may still write to its memory.
    cluster_meet();
}
