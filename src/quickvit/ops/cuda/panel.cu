// A linear map with the weights at rest, and what comes after it, on NVIDIA's Hopper; panel.py says what it does.
//
// Constants that are put before this file: M, F (eighths of both widths), AFTER (what comes after it: one of the names that
// are defined as numbers), ALONG (whether the two groups of warps that multiply have different tokens; else they have
// different columns), SLOTS (of boxes of tokens), CLUSTER, HALF (float16 in place of bfloat16), BIAS (0: none, 1: of the type
// of x, 2: float), SCALED (whether tokens have a factor), the polynomial of GELU, and of octets HEADS, PIECE and ROOM. What
// the hardware does is in hopper.cuh.

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
static_assert(AFTER == OCTETS || F % N == 0, "all columns of a group of warps are of one irrep");
static_assert(AFTER == OCTETS || !HALF, "GELU rounds like bfloat16");

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
// for its gradient those in bfloat16, and as octets the blocks 2i and 2i + 1 of one of both, at 2i, and of the other at
// 2i + 1.
constexpr int PAIRS = 2 * EIGHTS;
using Tile = u32[8][PAIRS];

// Columns from a thread's first pair to the next, and from a thread to the next. For GELU the weights' columns come in such
// an order that all of a thread lie side by side.
constexpr int NEXT_PAIR = AFTER == OCTETS ? 8 : 2, NEXT_THREAD = AFTER == OCTETS ? 2 : 8;
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
            tile[2 * two + i][pair] = AFTER == OCTETS ? pack(v[0][i], v[1][i]) :
                AFTER == GRADIENT ? pack(v[i][0], v[i][1]) : mul_2(pack_2(v[i][0], v[i][1]), both(SIXTEENTH));
    }
}

// Two numbers of float16.
struct Two {
    u32 pair;

    __device__ __forceinline__ Two operator+(Two other) const {
        return {add_2(pair, other.pair)};
    }

    __device__ __forceinline__ Two operator-(Two other) const {
        return {sub_2(pair, other.pair)};
    }
};

// Fourier transforms without their factors.
template <class Number>
__device__ __forceinline__ void to_regular(Number (&v)[8]) {
    const Number a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    const Number e = v[4] + v[6], f = v[4] - v[6], g = v[5] + v[7], h = v[5] - v[7];
    const Number ac = a + c, a_c = a - c, bd = b + d, b_d = b - d, eh = e + h, e_h = e - h, fg = f + g, f_g = f - g;
    v[0] = ac + eh, v[1] = a_c + f_g, v[2] = ac - eh, v[3] = a_c - f_g;
    v[4] = bd - fg, v[5] = b_d - e_h, v[6] = bd + fg, v[7] = b_d + e_h;
}

template <class Number>
__device__ __forceinline__ void to_isotypic(Number (&r)[8]) {
    const Number s = r[0] + r[2], t = r[1] + r[3], u = r[6] + r[4], w = r[7] + r[5];
    const Number k = r[0] - r[2], l = r[1] - r[3], m = r[6] - r[4], n = r[7] - r[5];
    const Number st = s + t, s_t = s - t, uw = u + w, u_w = u - w, kn = k + n, k_n = k - n, ml = m + l, m_l = m - l;
    r[0] = st + uw, r[1] = st - uw, r[2] = s_t + u_w, r[3] = s_t - u_w;
    r[4] = kn + ml, r[5] = m_l + k_n, r[6] = kn - ml, r[7] = m_l - k_n;
}

// u (1 + tanh(p(z) / 2)) for z = 4√2 u, of two entries: GELU(z) / 2√2.
__device__ __forceinline__ u32 gelu(u32 u) {
    return fma_2(u, tanh_2(mul_2(u, fma_2(mul_2(u, u), both(P1), both(P0)))), u);
}

// An eighth of the slope of GELU there, Φ + z Φ': with τ for tanh (1 + τ + (1 - τ²) u (P0 + 3 P1 u²)) / 16.
__device__ __forceinline__ u32 slope(u32 u) {
    // Further out τ is 1 and the rest no number.
    u = min_2(max_2(u, both(-8)), both(8));
    const u32 square = mul_2(u, u), tau = tanh_2(mul_2(u, fma_2(square, both(P1), both(P0))));
    const u32 rest = fma_2(mul_2(tau, both(-1)), tau, both(1));
    const u32 twice = fma_2(rest, mul_2(u, fma_2(square, both(3 * P1), both(P0))), tau);
    return fma_2(twice, both(SIXTEENTH), both(SIXTEENTH));
}

// GELU through the regular domain: a sixteenth of x comes in float16, and y goes in bfloat16.
__device__ __forceinline__ void gelu_of_pair(Tile &tile, int pair) {
    Two v[8];
#pragma unroll
    for (int block = 0; block < 8; block++) v[block].pair = tile[block][pair];
    to_regular(v);
#pragma unroll
    for (int block = 0; block < 8; block++) v[block].pair = gelu(v[block].pair);
    to_isotypic(v);
#pragma unroll
    for (int block = 0; block < 8; block++) tile[block][pair] = to_bfloat(v[block].pair);
}

// Its gradient, all in bfloat16: that of y becomes that of x, from x. It may be too small for float16, its factor is not.
__device__ __forceinline__ void gradient_of_pair(Tile &tile, int pair, const u32 (&x)[8][EIGHTS]) {
    Two factors[8];
    float v[2][8];
#pragma unroll
    for (int block = 0; block < 8; block++) {
        const float2 values = unpack(x[block][pair % EIGHTS]), grads = unpack(tile[block][pair]);
        factors[block].pair = mul_2(pack_2(values.x, values.y), both(SIXTEENTH));
        v[0][block] = grads.x, v[1][block] = grads.y;
    }
    to_regular(factors);
    to_regular(v[0]), to_regular(v[1]);
#pragma unroll
    for (int block = 0; block < 8; block++) {
        const float2 factor = unpack_2(slope(factors[block].pair));
        v[0][block] *= factor.x, v[1][block] *= factor.y;
    }
    to_isotypic(v[0]), to_isotypic(v[1]);
#pragma unroll
    for (int block = 0; block < 8; block++) tile[block][pair] = pack(v[0][block], v[1][block]);
}

// What a thread has of the tile before this one, and where it goes.
struct Before {
    Tile tile;
    u16 *y;
    // What GELU is of: the gradient reads it, and BOTH writes it.
    u16 *x;
    int tokens;
    // The first of both rows, and of the columns.
    int row, column;
    // Whether there is one.
    bool any;
    // What GELU was of, in one of both rows.
    u32 read[8][EIGHTS];

    // What is to be done with it in one of the turns of a tile.
    __device__ __forceinline__ void part(int turn) {
        if (!any) return;
#pragma unroll
        for (int pair = PAIRS * turn / TURNS; pair < PAIRS * (turn + 1) / TURNS; pair++) {
            const int which = pair / EIGHTS;
            const bool first = pair % EIGHTS == 0, last = pair % EIGHTS + 1 == EIGHTS;
            if (AFTER == OCTETS)
                store_octets(pair);
            else {
                if (AFTER == BOTH && first) store_row(x, which, true);
                if (AFTER == GRADIENT)
                    gradient_of_pair(tile, pair, read);
                else
                    gelu_of_pair(tile, pair);
                if (AFTER == GRADIENT && last && which == 0) read_row(1);
                if (last) store_row(y, which, false);
            }
        }
    }

    __device__ __forceinline__ bool inside(int token, int first) const {
        return token < tokens && first < F;
    }

    // Eight columns of all blocks, of one of both rows: as they are, or, before GELU, from sixteenths.
    __device__ __forceinline__ void store_row(u16 *target, int which, bool sixteenths) {
        const int token = row + 8 * which;
        if (!inside(token, column)) return;
        u16 *place = target + (long long)token * (8 * F) + column;
#pragma unroll
        for (int block = 0; block < 8; block++) {
            u32 v[EIGHTS];
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) {
                v[i] = tile[block][which * EIGHTS + i];
                if (sixteenths) v[i] = to_bfloat(mul_2(v[i], both(16)));
            }
            store_global(place + block * F, v[0], v[1], v[2], v[3]);
        }
    }

    __device__ __forceinline__ void read_row(int which) {
        const int token = row + 8 * which;
        const u16 *place = x + (long long)token * (8 * F) + column;
#pragma unroll
        for (int block = 0; block < 8; block++) {
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) read[block][i] = 0;
            if (inside(token, column)) load_global(read[block], place + block * F);
        }
    }

    // All blocks of two columns of q, k or v, each of which has HEADS of PIECE columns, in the room for ROOM octets.
    __device__ __forceinline__ void store_octets(int pair) {
        const int token = row + pair / EIGHTS * 8, first = column + pair % EIGHTS * NEXT_PAIR;
        if (!inside(token, first)) return;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int heads = (first + i) / PIECE, feature = heads / HEADS;
            const long long head = ((long long)feature * tokens + token) * HEADS + heads % HEADS;
            u16 *place = y + 8 * (head * ROOM + (first + i) % PIECE);
            store_global(place, tile[i][pair], tile[2 + i][pair], tile[4 + i][pair], tile[6 + i][pair]);
        }
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
                const bool octets = AFTER == OCTETS;
                const int row = irrep * F + columns, group = octets ? 0 : (row + copy * F) / N;
                load_weights(target, whole ? wide : narrow, barrier, step * WIDE, octets ? copy : 0, octets ? row : 0, group);
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
    const void *bias, const float *factors, u16 *x, u16 *y, int tokens, u32 weights, u32 weights_full, u32 weights_empty,
    const Ring &ring, int blocks, int tiles, u32 rank, int group
) {
    const Share share(tiles);
    const u32 ones = weights + IRREP_2;
    const int lane = threadIdx.x % 32;
    // This thread's first row and column of a tile.
    const int line = (ALONG ? 64 * group : 0) + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int place = (ALONG ? 0 : N * group) + lane % 4 * NEXT_THREAD;
    Work work = {ring, Turn(0), Turn(0), group};
    Before before = {{}, y, x, tokens, 0, 0, false, {}};
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
        if (AFTER == GRADIENT) before.read_row(0);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) before.part(turn);
}

constexpr int THREADS = 128 * (GROUPS + 1);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    panel(
        const __grid_constant__ Maps maps, const void *bias, const float *factors, u16 *x, u16 *y, int tokens, int blocks,
        int tiles
    ) {
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
        compute(bias, factors, x, y, tokens, weights, weights_full, weights_empty, ring, blocks, tiles, rank, group);
    } else {
        fewer_registers<24>();
        if (threadIdx.x == 128 * GROUPS) load(maps, weights, weights_full, weights_empty, ring, blocks, tiles, rank);
        __syncwarp();
    }
    // Nobody goes while others may still write to its memory.
    cluster_meet();
}
