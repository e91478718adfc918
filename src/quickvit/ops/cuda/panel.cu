// A linear map with the weights at rest, and what comes after it, on NVIDIA's Hopper; panel.py says what it does.
//
// Constants that are put before this file: M, F (eighths of both widths), AFTER (what comes after the map: one of the names
// that are defined as numbers), COLUMNS (of each block of a panel), RUN (eights of them that come in one box, for GELU in a
// thread's order), SLOTS (of boxes of tokens), CLUSTER, BIAS (0: none, 1: in bfloat16, 2: in float), SCALED (whether tokens
// have a factor), the polynomial of GELU, and of octets HEADS, PIECE and ROOM. What the hardware does is in hopper.cuh.

// Of x and of both weights, and of what is left of their irreps.
struct Maps {
    Boxes x, x_rest, one, one_rest, two, two_rest;
};

// Groups of four warps that multiply, one tile each; tokens of a tile, and its columns in eights.
constexpr int GROUPS = 2, ROWS = 64, EIGHTS = COLUMNS / 8;
// Channels of a box: what is left of an irrep comes in a narrow one, to which more may belong.
constexpr int WIDE = 64, NARROW = 32;

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
constexpr int AHEAD = 1;
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

    __device__ __forceinline__ void skip(int count) {
        *this = Turn(number + count);
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
};

// total = the tokens of some turns of an irrep times weights; the last products go on.
template <int WIDTH, int CHANNELS>
__device__ __forceinline__ void multiply(float (&total)[WIDTH / 2], u32 weights, Work &work, int begin, int end, bool older) {
#pragma unroll
    for (int step = begin; step < end; step++) {
        const u32 tokens = work.ring.boxes + work.turn.slot * BOX, columns = weights + bytes_of(WIDTH, WIDE) * step;
        work.ring.wait(work.turn);
        products_begin();
        const u32 left = operand(tokens), right = operand(columns), rows = upper(is_wide(step, CHANNELS) ? WIDE : NARROW);
#pragma unroll
        for (int channel = 0; channel < WIDE; channel += 16)
            if (step * WIDE + channel < CHANNELS)
                wgmma<WIDTH>(total, left + channel / 8, right + channel / 8, rows, step + channel > 0);
        products_commit();
        ++work.turn;
        if (older || step >= AHEAD) {
            products_wait<AHEAD>();
            work.ring.release(work.done);
        }
    }
}

// ------------------------------------------------------------------ what comes after products

// Of each eight columns of a product a thread has two neighbours in each of two rows: pairs, those of the first row first. A
// tile has them of each block: 16ths in float16, for the gradient of GELU in bfloat16. For GELU and its gradient the weights'
// columns come in such an order that the pairs of a run of eights lie side by side.
constexpr int PAIRS = 2 * EIGHTS;
using Tile = u32[8][PAIRS];
constexpr float SIXTEENTH = 0.0625f;

// The column of the result at which a thread's pairs of an eight begin.
__device__ __forceinline__ int column_of(int eight) {
    if (AFTER == OCTETS) return 8 * eight + threadIdx.x % 4 * 2;
    return eight / RUN * RUN * 8 + threadIdx.x % 4 * RUN * 2 + eight % RUN * 2;
}

// In bfloat16 what is there as sixteenths.
__device__ __forceinline__ u32 whole(u32 pair) {
    return to_bfloat(mul_2(pair, both(16)));
}

// Where the pairs of a thread come from, or go: to a matrix as wide as the result, from this row and column on.
struct Matrix {
    u16 *entries;
    int row, column, tokens;

    __device__ __forceinline__ u16 *place(int pair, int block) const {
        const int token = row + pair / EIGHTS * 8, first = column + column_of(pair % EIGHTS);
        return token < tokens && first < F ? entries + (long long)token * (8 * F) + block * F + first : nullptr;
    }

    // All blocks of both neighbours: each is a column of q, k or v, which have HEADS of PIECE columns, in room for ROOM.
    __device__ __forceinline__ void store_octets(const Tile &tile, int pair) const {
        const int token = row + pair / EIGHTS * 8, first = column + column_of(pair % EIGHTS);
        u32 octets[2][4];
#pragma unroll
        for (int two = 0; two < 4; two++) {
            const u32 a = whole(tile[2 * two][pair]), b = whole(tile[2 * two + 1][pair]);
            octets[0][two] = a & 0xFFFF | b << 16, octets[1][two] = a >> 16 | b & 0xFFFF0000;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int head = (first + i) / PIECE, feature = head / HEADS;
            const long long place = (((long long)feature * tokens + token) * HEADS + head % HEADS) * ROOM + (first + i) % PIECE;
            store_global(entries + 8 * place, octets[i]);
        }
    }

    // A run of pairs of all blocks, as they are, or from sixteenths before GELU.
    __device__ __forceinline__ void store(const Tile &tile, int pair, bool sixteenths) const {
#pragma unroll
        for (int block = 0; block < 8; block++) {
            u32 run[RUN];
#pragma unroll
            for (int i = 0; i < RUN; i++) {
                run[i] = tile[block][pair + i];
                if (sixteenths) run[i] = whole(run[i]);
            }
            store_global(place(pair, block), run);
        }
    }

    __device__ __forceinline__ void load(u32 (&run)[8][RUN], int pair) const {
#pragma unroll
        for (int block = 0; block < 8; block++) {
#pragma unroll
            for (int i = 0; i < RUN; i++) run[block][i] = 0;
            if (const u16 *from = place(pair, block)) load_global(run[block], from);
        }
    }
};

// A sixteenth of the factors of this thread's rows, or of 1.
__device__ __forceinline__ void load_factors(u32 (&factor)[2], const float *factors, const Matrix &y) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int token = y.row + 8 * i;
        factor[i] = both(!SCALED ? SIXTEENTH : token < y.tokens ? SIXTEENTH * factors[token] : 0);
    }
}

// A sixteenth of the bias of this thread's columns.
__device__ __forceinline__ void load_bias(u32 (&shift)[EIGHTS], const void *bias, const Matrix &y) {
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        const int place = y.column + column_of(eight);
        float2 pair = {0, 0};
        if (place < F) pair = BIAS == 1 ? unpack(((const u32 *)bias)[place / 2]) : ((const float2 *)bias)[place / 2];
        shift[eight] = pack_2(SIXTEENTH * pair.x, SIXTEENTH * pair.y);
    }
}

// Two blocks of a tile, from products that have ended, times factors of both rows, plus a bias. These are read here, from the
// cache, since registers are scarce.
__device__ __forceinline__ void keep(
    Tile &tile, int two, const float *one, const float *other, const void *bias, const float *factors, const Matrix &y,
    bool biased
) {
    u32 factor[2], shift[EIGHTS];
    load_factors(factor, factors, y);
    if (biased) load_bias(shift, bias, y);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        const int row = pair / EIGHTS, eight = pair % EIGHTS;
        const float *a = one + 4 * eight + 2 * row, *b = other + 4 * eight + 2 * row;
        u32 &first = tile[2 * two][pair], &second = tile[2 * two + 1][pair];
        if (AFTER == GRADIENT) {
            first = pack(a[0], a[1]), second = pack(b[0], b[1]);
        } else {
            const u32 left = pack_2(a[0], a[1]), right = pack_2(b[0], b[1]);
            first = biased ? fma_2(left, factor[row], shift[eight]) : mul_2(left, factor[row]);
            second = mul_2(right, factor[row]);
        }
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
__device__ __forceinline__ void gradient_of_pair(Tile &tile, int pair, const u32 (&x)[8][RUN]) {
    Two factors[8];
    float v[2][8];
#pragma unroll
    for (int block = 0; block < 8; block++) {
        const float2 values = unpack(x[block][pair % RUN]), grads = unpack(tile[block][pair]);
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

// GELU of a tile to y, and what it is of to x; or its gradient, of what x has, the first run of which came before; or octets.
__device__ __forceinline__ void finish(Tile &tile, const Matrix &x, const Matrix &y, u32 (&before)[8][RUN]) {
#pragma unroll
    for (int run = 0; run < PAIRS; run += RUN) {
        u32 next[8][RUN];
        if (AFTER == GRADIENT && run + RUN < PAIRS) x.load(next, run + RUN);
        // As a branch it also keeps the compiler from computing all runs before it stores one.
        if (AFTER != OCTETS && y.place(run, 0)) {
            if (AFTER == BOTH) x.store(tile, run, true);
#pragma unroll
            for (int pair = run; pair < run + RUN; pair++)
                if (AFTER == GRADIENT)
                    gradient_of_pair(tile, pair, before);
                else
                    gelu_of_pair(tile, pair);
            y.store(tile, run, false);
        }
#pragma unroll
        for (int pair = run; pair < run + RUN; pair++)
            if (AFTER == OCTETS && y.place(pair, 0)) y.store_octets(tile, pair);
#pragma unroll
        for (int i = 0; i < 8 * RUN; i++)
            if (AFTER == GRADIENT && run + RUN < PAIRS) before[i / RUN][i % RUN] = next[i / RUN][i % RUN];
    }
}

// ------------------------------------------------------------------ the two kinds of warps

// This cluster's tiles: from `start` on `blocks` blocks of tokens of one group of panels after the other. All clusters are at
// the same tokens at about the same time, which then are in the cache: of each group so many clusters have `each` blocks, and
// clusters that are left share what is left of them.
struct Share {
    int start, blocks, first, last;

    __device__ __forceinline__ Share(int all, int groups, int each) {
        const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER, of_one = clusters / groups;
        const int left = cluster - of_one * groups, lefts = clusters - of_one * groups;
        if (left < 0) {
            const int group = cluster % groups;
            start = min(cluster / groups * each, all);
            blocks = min(each, all - start);
            first = group * blocks, last = first + blocks;
        } else {
            start = min(of_one * each, all);
            blocks = all - start;
            first = (long long)blocks * groups * left / lefts, last = (long long)blocks * groups * (left + 1) / lefts;
        }
    }

    // Whether a tile is the first or the last one of its panel here.
    __device__ __forceinline__ bool begins(int tile) const {
        return tile == first || tile % blocks == 0;
    }

    __device__ __forceinline__ bool ends(int tile) const {
        return tile + 1 == last || (tile + 1) % blocks == 0;
    }

    __device__ __forceinline__ int row(int tile) const {
        return (start + tile % blocks) * ROWS;
    }

    // Of a program of the cluster.
    __device__ __forceinline__ int column(int tile, u32 rank) const {
        return (tile / blocks * CLUSTER + rank) * COLUMNS;
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

// The weights of a panel for one of the irreps of one dimension, or for both copies of E, from a column on.
template <int CHANNELS, int COPIES>
__device__ __forceinline__ void load_irrep(
    u32 target, const Boxes &wide, const Boxes &narrow, u32 barrier, int irrep, int column
) {
    constexpr int TOGETHER = 8 * RUN;
    for (int step = 0; step < turns_of(CHANNELS); step++) {
        const bool whole = is_wide(step, CHANNELS);
        for (int copy = 0; copy < COPIES; copy++)
            for (int columns = column; columns < column + COLUMNS; columns += TOGETHER) {
                // Copies of octets are neighbours, as heads have them.
                const bool octets = AFTER == OCTETS;
                const int group = ((irrep + (octets ? 0 : copy)) * F + columns) / TOGETHER;
                load_weights(target, whole ? wide : narrow, barrier, step * WIDE, octets ? copy : 0, group);
                target += 2 * TOGETHER * (whole ? WIDE : NARROW);
            }
    }
}

__device__ __forceinline__ void load(
    const Maps &maps, u32 weights, u32 weights_full, u32 weights_empty, const Ring &ring, const Share &share, u32 rank
) {
    Turn turn(0);
    int panels = 0;
    for (int tile = share.first; tile < share.last; tile++) {
        const int row = share.row(tile);
        if (share.begins(tile)) {
            const int column = share.column(tile, rank);
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

// The products of a tile. What they come to is kept while the next ones go on; while the last ones do, so does `meanwhile`.
template <class Meanwhile>
__device__ __forceinline__ void multiply_tile(
    Tile &tile, Work &work, u32 weights, const void *bias, const float *factors, const Matrix &y, Meanwhile meanwhile
) {
    // Both copies of a component of E, and two irreps of one dimension.
    float component[COLUMNS], irreps[2][COLUMNS / 2];
    const auto keep_irreps = [&](int part) {
        hold(irreps[0]), hold(irreps[1]);
        keep(tile, part, irreps[0], irreps[1], bias, factors, y, BIAS && part == 0);
    };
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const u32 first = weights + IRREP_2 + 2 * part * IRREP_1;
        multiply<2 * COLUMNS, 2 * M>(component, weights, work, 0, AHEAD, part == 1);
        if (part == 1) keep_irreps(0);
        multiply<2 * COLUMNS, 2 * M>(component, weights, work, AHEAD, TURNS_2, true);
        multiply<COLUMNS, M>(irreps[0], first, work, 0, AHEAD, true);
        hold(component);
        keep(tile, 2 + part, component, component + COLUMNS / 2, bias, factors, y, false);
        multiply<COLUMNS, M>(irreps[0], first, work, AHEAD, TURNS_1, true);
        multiply<COLUMNS, M>(irreps[1], first + IRREP_1, work, 0, TURNS_1, true);
    }
    meanwhile();
    products_wait<0>();
    keep_irreps(1);
#pragma unroll
    for (int rest = 0; rest < AHEAD; rest++) work.ring.release(work.done);
}

__device__ __forceinline__ void compute(
    const void *bias, const float *factors, u16 *x, u16 *y, int tokens, u32 weights, u32 weights_full, u32 weights_empty,
    u32 order, const Ring &ring, const Share &share, u32 rank, int group
) {
    // This thread's first row of a tile.
    const int line = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    Work work = {ring, Turn(0), Turn(0)};
    int panels = 0, tiles = 0;
    for (int tile = share.first; tile < share.last; tile++) {
        const int row = share.row(tile) + line, column = share.column(tile, rank);
        // One group of warps multiplies while the other one is busy with what comes after.
        const bool mine = (tile - share.first) % GROUPS == group;
        Tile pairs;
        u32 before[8][RUN];
        if (share.begins(tile)) barrier_wait(weights_full, panels++ & 1);
        const Matrix of_x = {x, row, column, tokens}, of_y = {y, row, column, tokens};
        if (mine) {
            // The other one has met all of its boxes, so that no barrier is two phases behind.
            if (tile > share.first) barrier_wait(order + 8 * group, tiles++ & 1);
            const auto meanwhile = [&] {
                if (threadIdx.x % 32 == 0) barrier_arrive(order + 8 * (1 - group));
                if (AFTER == GRADIENT) of_x.load(before, 0);
            };
            multiply_tile(pairs, work, weights, bias, factors, of_y, meanwhile);
        } else {
            work.turn.skip(TURNS), work.done.skip(TURNS);
        }
        if (share.ends(tile) && threadIdx.x % 32 == 0) barrier_arrive(weights_empty);
        if (mine) finish(pairs, of_x, of_y, before);
    }
}

constexpr int THREADS = 128 * (GROUPS + 1);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    panel(
        const __grid_constant__ Maps maps, const void *bias, const float *factors, u16 *x, u16 *y, int tokens, int blocks,
        int groups, int each
    ) {
    extern __shared__ __align__(1024) char memory[];
    const u32 weights = shared(memory), boxes = weights + PANEL, barriers = boxes + SLOTS * BOX;
    const Ring ring = {boxes, barriers, barriers + 8 * SLOTS};
    const u32 weights_full = barriers + 16 * SLOTS, weights_empty = weights_full + 8, order = weights_empty + 8;
    const u32 rank = blockIdx.x % CLUSTER;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(ring.full + 8 * slot, 1);
            // All warps of the group that multiplies it, in each multiprocessor.
            barrier_init(ring.empty + 8 * slot, 4 * CLUSTER);
        }
        barrier_init(weights_full, 1);
        barrier_init(weights_empty, 4 * GROUPS);
        for (int group = 0; group < GROUPS; group++) barrier_init(order + 8 * group, 4);
        barriers_are_ready();
    }
    __syncthreads();
    cluster_meet();
    // The same in all threads of a warp, said so that the compiler sees it.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const Share share(blocks, groups, each);
    if (group < GROUPS) {
        more_registers<240>();
        compute(bias, factors, x, y, tokens, weights, weights_full, weights_empty, order, ring, share, rank, group);
    } else {
        fewer_registers<24>();
        if (threadIdx.x == 128 * GROUPS) load(maps, weights, weights_full, weights_empty, ring, share, rank);
        __syncwarp();
    }
    // Nobody goes while others may still write to its memory.
    cluster_meet();
}
