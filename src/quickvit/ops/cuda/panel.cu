// A linear map with the weights at rest, and GELU or heads of attention, on NVIDIA's Hopper; panel.py says what it does.
//
// Constants that are put before this file: M, F (eighths of both widths), N (columns of a panel), SLOTS (of boxes of
// tokens), CLUSTER, HELPERS, FETCH (whether boxes come to the cache early), HALF (float16 in place of bfloat16), BIAS
// (0: none, 1: of the type of x, 2: float), PIECE (channels of a head in an irrep of one dimension, 0 for GELU), HEADS, and
// the polynomials of GELU. What the hardware does is in hopper.cuh.

// Of x and of both weights, and of what is left of their irreps.
struct Maps {
    Boxes x, x_rest, one, one_rest, two, two_rest;
};

// Tokens of a tile, and channels of a box: what is left of an irrep comes in a narrow one, to which more may belong.
constexpr int ROWS = 64, WIDE = 64, NARROW = 32;

__device__ constexpr int turns_of(int channels) {
    return (channels + WIDE - 1) / WIDE;
}

// Bytes of a column of weights of so many channels.
__device__ constexpr int bytes_of(int channels) {
    return 2 * (channels / WIDE * WIDE + (channels % WIDE ? NARROW : 0));
}

// Boxes of an irrep of one dimension, of a component of E, and of a tile.
constexpr int TURNS_1 = turns_of(M), TURNS_2 = turns_of(2 * M), TURNS = 4 * TURNS_1 + 2 * TURNS_2;
// Bytes of a box of tokens, of the weights of an irrep, and of a panel.
constexpr int BOX = ROWS * WIDE * 2, IRREP_1 = N * bytes_of(M), IRREP_2 = 2 * N * bytes_of(2 * M);
constexpr int PANEL = 4 * IRREP_1 + IRREP_2;
// Heads of a panel, and columns from a panel to the next, which may overlap.
constexpr int TOGETHER = PIECE ? N / PIECE : 0, EACH = PIECE ? TOGETHER * PIECE : N;
static_assert(!PIECE || (N == 32 && PIECE % 2 == 0), "of a head pairs of entries lie side by side");
// Eight rows and 32 columns of all blocks at a time pass through shared memory, on a desk. Four warps multiply, and each
// has so many others for what comes after, which have a desk each.
constexpr int DESK = 8 * 8 * 32 * 2, PARTS = N / 32 * 2;
// Boxes whose products the warps that multiply do not wait for.
constexpr int AHEAD = 2;
static_assert(PARTS <= TURNS_2 && TURNS_1 >= AHEAD, "a tile leaves while the first irrep of the next one is multiplied");

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

// total = the tokens of some turns of an irrep times weights; the last products go on. `done` lags behind `turn`.
template <int COLUMNS, int CHANNELS>
__device__ __forceinline__ void multiply(
    float (&total)[COLUMNS / 2], u32 weights, const Ring &ring, Turn &turn, Turn &done, int begin, int end,
    bool older = true
) {
#pragma unroll
    for (int step = begin; step < end; step++) {
        ring.wait(turn);
        products_begin();
        const bool wide = (step + 1) * WIDE <= CHANNELS;
        const u32 left = operand(ring.boxes + turn.slot * BOX), right = operand(weights + step * COLUMNS * WIDE * 2);
#pragma unroll
        for (int channel = 0; channel < WIDE; channel += 16)
            if (step * WIDE + channel < CHANNELS)
                wgmma<COLUMNS>(total, left + channel / 8, right + channel / 8, upper(wide ? WIDE : NARROW), step + channel > 0);
        products_commit();
        ++turn;
        if (older) {
            products_wait<AHEAD>();
            ring.release(done);
        }
    }
}

// ------------------------------------------------------------------ GELU

// t Φ(s t) / 8 with s = √2/4, see triton/gelu.py and triton/hopper_gelu.py; in bfloat16 16 times that.
__device__ __forceinline__ float gelu(float t) {
#if HALF
    const float u = t * t;
    const float slope = fmaf(fmaf(fmaf(fmaf(u, Q4, Q3), u, Q2), u, Q1), u, Q0);
    const float root = rsqrt_of(fmaf(exp2_of(t * slope), 8.0f, 8.0f));
    return t * (root * root);
#else
    return fmaf(t, tanh_of(t * fmaf(t * t, P1, P0)), t);
#endif
}

// Two neighbours of a result.
__device__ __forceinline__ u32 result(float left, float right) {
    return HALF ? pack(left, right) : sixteenth(pack(left, right));
}

// GELU through the regular domain, of one entry of each block.
__device__ __forceinline__ void gelu_of_octet(float (&v)[8]) {
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    const float e = v[4] + v[6], f = v[4] - v[6], g = v[5] + v[7], h = v[5] - v[7];
    const float ac = a + c, a_c = a - c, bd = b + d, b_d = b - d;
    const float eh = e + h, e_h = e - h, fg = f + g, f_g = f - g;
    const float r0 = gelu(ac + eh), r1 = gelu(a_c + f_g), r2 = gelu(ac - eh), r3 = gelu(a_c - f_g);
    const float r4 = gelu(bd - fg), r5 = gelu(b_d - e_h), r6 = gelu(bd + fg), r7 = gelu(b_d + e_h);
    const float s = r0 + r2, t = r1 + r3, u = r6 + r4, w = r7 + r5;
    const float k = r0 - r2, l = r1 - r3, m = r6 - r4, n = r7 - r5;
    const float st = s + t, s_t = s - t, uw = u + w, u_w = u - w;
    const float kn = k + n, k_n = k - n, ml = m + l, m_l = m - l;
    v[0] = st + uw, v[1] = st - uw, v[2] = s_t + u_w, v[3] = s_t - u_w;
    v[4] = kn + ml, v[5] = m_l + k_n, v[6] = kn - ml, v[7] = m_l - k_n;
}

// ------------------------------------------------------------------ the three kinds of warps

// This cluster's tiles: blocks of tokens, of one group of panels after the other.
struct Share {
    int first, last;

    __device__ __forceinline__ explicit Share(u32 tiles) {
        const u32 cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
        first = tiles * cluster / clusters;
        last = tiles * (cluster + 1) / clusters;
    }
};

// A box of an irrep of so many channels, the first of which is at `origin`.
template <int CHANNELS>
__device__ __forceinline__ void load_turns(
    const Boxes &wide, const Boxes &narrow, const Ring &ring, Turn &turn, int origin, int row, u32 rank
) {
    for (int step = 0; step < turns_of(CHANNELS); step++, ++turn) {
        const u32 full = ring.full + 8 * turn.slot;
        const bool whole = (step + 1) * WIDE <= CHANNELS;
        barrier_wait(ring.empty + 8 * turn.slot, turn.phase ^ 1);
        barrier_expect(full, whole ? BOX : BOX / WIDE * NARROW);
        // They take turns to load, each for all.
        if (turn.number % CLUSTER == rank) {
            const Boxes &boxes = whole ? wide : narrow;
            load_tokens(ring.boxes + turn.slot * BOX, boxes, full, origin + step * WIDE, row);
            // By the time of the next tile its box is near.
            if (FETCH) fetch_tokens(boxes, origin + step * WIDE, row + ROWS);
        }
    }
}

// All channels of N rows of weights, so many rows after each other in shared memory.
template <int CHANNELS, int COLUMNS>
__device__ __forceinline__ void load_rows(u32 target, const Boxes &wide, const Boxes &narrow, u32 barrier, int row) {
    for (int step = 0; step < turns_of(CHANNELS); step++, target += COLUMNS * WIDE * 2)
        load_weights(target, (step + 1) * WIDE <= CHANNELS ? wide : narrow, barrier, step * WIDE, row);
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
            const int column = (tile / blocks * CLUSTER + rank) * EACH;
            barrier_wait(weights_empty, panels++ & 1 ^ 1);
            barrier_expect(weights_full, PANEL);
            // Of each box of E both copies; a head has twice as many neighbouring channels of it.
            load_rows<2 * M, 2 * N>(weights, maps.two, maps.two_rest, weights_full, PIECE ? 2 * column : column);
            const int other = PIECE ? 2 * column + N : F + column;
            for (int step = 0; step < TURNS_2; step++) {
                const bool whole = (step + 1) * WIDE <= 2 * M;
                const u32 target = weights + step * (2 * N * WIDE * 2) + N * 2 * (whole ? WIDE : NARROW);
                load_weights(target, whole ? maps.two : maps.two_rest, weights_full, step * WIDE, other);
            }
            for (int irrep = 0; irrep < 4; irrep++)
                load_rows<M, N>(
                    weights + IRREP_2 + irrep * IRREP_1, maps.one, maps.one_rest, weights_full, irrep * F + column
                );
        }
        for (int part = 0; part < 2; part++) {
            load_turns<2 * M>(maps.x, maps.x_rest, ring, turn, (4 + 2 * part) * M, row, rank);
            for (int irrep = 2 * part; irrep < 2 * part + 2; irrep++)
                load_turns<M>(maps.x, maps.x_rest, ring, turn, irrep * M, row, rank);
        }
    }
}

struct Desk {
    u32 place, full, empty;

    // Sixteen bytes of a row, such that neither eight rows nor pieces of two, four apart, meet in a bank.
    __device__ __forceinline__ u32 at(int row, int block, int piece) const {
        return place + row * 512 + 16 * (4 * block + piece ^ row);
    }

    // This warp has read what it needs.
    __device__ __forceinline__ void release() const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    }
};

// Eight rows and 32 columns of all blocks that a warp has multiplied, to a desk that is free.
__device__ __forceinline__ void leave(
    const u32 (&one)[4][N / 4], const u32 (&two)[2][N / 2], int part, const Desk &desk, u32 phase
) {
    const int lane = threadIdx.x % 32;
    barrier_wait(desk.empty, phase ^ 1);
#pragma unroll
    for (int block = 0; block < 8; block++) {
        // Of eight columns of a product a thread has two entries of each of two rows.
        const u32 *entries = (block < 4 ? one[block] : two[block / 2 - 2] + block % 2 * (N / 4)) + part / 2 * 8 + part % 2;
        store_matrices(desk.at(lane % 8, block, lane / 8), entries[0], entries[2], entries[4], entries[6]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(desk.full);
}

// What a warp does that has a desk: something with what comes there, which is the part of each tile that is its own. Of
// that it is told the first of its columns, and of its eight rows.
template <class Something>
__device__ __forceinline__ void serve(const Desk &desk, int blocks, int tiles, u32 rank, int helper, int warp, Something something) {
    const Share share(tiles);
    u32 phase = 0;
    for (int work = helper; work < (share.last - share.first) * PARTS; work += HELPERS, phase ^= 1) {
        const int tile = share.first + work / PARTS, part = work % PARTS;
        const int column = (tile / blocks * CLUSTER + rank) * EACH + part / 2 * 32;
        const int row = tile % blocks * ROWS + warp * 16 + part % 2 * 8;
        barrier_wait(desk.full, phase);
        something(column, row);
    }
}

// GELU of what comes to a desk, and its way to y.
__device__ __forceinline__ void activate(TYPE *y, const Desk &desk, int tokens, int column, int row) {
    const int lane = threadIdx.x % 32, line = lane / 8 + lane / 4 % 2 * 4;
    u32 entries[8][4], results[8][4];
#pragma unroll
    for (int block = 0; block < 8; block++) load_shared(entries[block], desk.at(line, block, lane % 4));
    desk.release();
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        float octets[2][8];
#pragma unroll
        for (int right = 0; right < 2; right++) {
#pragma unroll
            for (int block = 0; block < 8; block++) octets[right][block] = unpack(entries[block][pair], right);
            gelu_of_octet(octets[right]);
        }
#pragma unroll
        for (int block = 0; block < 8; block++) results[block][pair] = result(octets[0][block], octets[1][block]);
    }
    row += line, column += lane % 4 * 8;
    if (row >= tokens || column >= F) return;
    TYPE *out = y + (long long)row * (8 * F) + column;
#pragma unroll
    for (int block = 0; block < 8; block++) store_global(out + block * F, results[block]);
}

#if PIECE
// What comes to a desk as heads in pairs, see heads.py: each lane has eight entries of a head, which lie side by side.
__device__ __forceinline__ void hand_out(TYPE *y, const Desk &desk, int tokens, int column, int row) {
    const int lane = min((int)(threadIdx.x % 32), EACH - 1), eight = lane % PIECE;
    const int among = lane / PIECE, head = column / PIECE + among;
    u32 entries[8][4];
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        // Its pieces are those of A1 A2 B1 B2, then two of each component of E.
        const int piece = 2 * pair + eight % 2, entry = eight / 2 * 2;
        const int channel = pair < 2 ? among * PIECE + entry : (2 * among + piece % 2) * PIECE + entry;
        const int block = pair < 2 ? piece : 2 * pair + channel / 32;
#pragma unroll
        for (int line = 0; line < 8; line++)
            entries[line][pair] = load_shared(desk.at(line, block, channel % 32 / 8) + channel % 8 * 2);
    }
    desk.release();
    if (threadIdx.x % 32 >= EACH || head >= 3 * HEADS) return;
    TYPE *out = y + ((long long)(head / HEADS) * tokens + row) * (HEADS * 8 * PIECE) + head % HEADS * (8 * PIECE) + 8 * eight;
#pragma unroll
    for (int line = 0; line < 8; line++)
        if (row + line < tokens) store_global(out + line * (HEADS * 8 * PIECE), entries[line]);
}
#endif

template <int SIZE>
__device__ __forceinline__ void pack_all(u32 (&packed)[SIZE], float (&total)[2 * SIZE]) {
    hold(total);
#pragma unroll
    for (int i = 0; i < SIZE; i++) packed[i] = pack(total[2 * i], total[2 * i + 1]);
}

// Two neighbours of the bias of each of eight columns.
__device__ __forceinline__ void load_bias(float (&shift)[N / 4], const void *bias, int column) {
#pragma unroll
    for (int eight = 0; eight < N / 8; eight++) {
        const int place = column + 8 * eight + threadIdx.x % 4 * 2;
        shift[2 * eight] = shift[2 * eight + 1] = 0;
        if (BIAS == 1 && place < F) {
            const u32 both = *(const u32 *)((const TYPE *)bias + place);
            shift[2 * eight] = unpack(both, 0), shift[2 * eight + 1] = unpack(both, 1);
        } else if (BIAS == 2 && place < F) {
            const float2 both = *(const float2 *)((const float *)bias + place);
            shift[2 * eight] = both.x, shift[2 * eight + 1] = both.y;
        }
    }
}

__device__ __forceinline__ void compute(
    const void *bias, u32 weights, u32 weights_full, u32 weights_empty, const Ring &ring, const Desk &desks, int blocks,
    int tiles, u32 rank
) {
    const Share share(tiles);
    const u32 ones = weights + IRREP_2;
    const int lane = threadIdx.x % 32;
    Turn turn(0), done(0);
    // Blocks A1 A2 B1 B2, and both components of E with two copies each, of the tile before.
    u32 one[4][N / 4], two[2][N / 2];
    float shift[N / 4];
    // Of the desks: the next one, and how often all were used.
    int next = 0, uses = 0;
    const auto leave_part = [&](int part) {
        leave(one, two, part, {desks.place + next * DESK, desks.full + 8 * next, desks.empty + 8 * next}, uses & 1);
        if (++next == HELPERS) next = 0, uses++;
    };
    int panels = 0;
    for (int tile = share.first; tile < share.last; tile++) {
        if (tile == share.first || tile % blocks == 0) {
            barrier_wait(weights_full, panels++ & 1);
        }
        // In turns: what was there before is packed once its products have ended, while the next ones go on.
        float component[N], irreps[2][N / 2];
#pragma unroll
        for (int step = 0; step < TURNS_2; step++) {
            if (step < PARTS && tile > share.first) leave_part(step);
            multiply<2 * N, 2 * M>(component, weights, ring, turn, done, step, step + 1, step >= AHEAD);
        }
#pragma unroll
        for (int part = 0; part < 2; part++) {
            if (part == 1) {
                multiply<2 * N, 2 * M>(component, weights, ring, turn, done, 0, AHEAD);
                pack_all(one[1], irreps[1]);
                multiply<2 * N, 2 * M>(component, weights, ring, turn, done, AHEAD, TURNS_2);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int irrep = 2 * part + i;
                // Long before it is needed.
                if (irrep == 1) load_bias(shift, bias, (tile / blocks * CLUSTER + rank) * EACH);
                multiply<N, M>(irreps[i], ones + irrep * IRREP_1, ring, turn, done, 0, AHEAD);
                if (i == 0)
                    pack_all(two[part], component);
                else {
                    hold(irreps[0]);
#pragma unroll
                    for (int j = 0; j < N / 2; j++)
                        if (part == 0) irreps[0][j] += shift[j / 4 * 2 + j % 2];
                    pack_all(one[irrep - 1], irreps[0]);
                }
                multiply<N, M>(irreps[i], ones + irrep * IRREP_1, ring, turn, done, AHEAD, TURNS_1);
            }
        }
        products_wait<0>();
        pack_all(one[3], irreps[1]);
#pragma unroll
        for (int left = 0; left < AHEAD; left++) ring.release(done);
        if ((tile + 1 == share.last || (tile + 1) % blocks == 0) && lane == 0) barrier_arrive(weights_empty);
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++) leave_part(part);
}

constexpr int WARPS = 4 + 4 * HELPERS, THREADS = 32 * (WARPS + 4);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    panel(const __grid_constant__ Maps maps, const void *bias, TYPE *y, int tokens, int blocks, int tiles) {
    extern __shared__ __align__(1024) char memory[];
    const u32 weights = shared(memory), boxes = weights + PANEL, desks = boxes + SLOTS * BOX;
    const u32 first = desks + 4 * HELPERS * DESK;
    const Ring ring = {boxes, first, first + 8 * SLOTS};
    const u32 desks_full = first + 16 * SLOTS, desks_empty = desks_full + 32 * HELPERS;
    const u32 weights_full = desks_empty + 32 * HELPERS, weights_empty = weights_full + 8;
    const u32 rank = blockIdx.x % CLUSTER;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(ring.full + 8 * slot, 1);
            // Four warps in each multiprocessor.
            barrier_init(ring.empty + 8 * slot, 4 * CLUSTER);
        }
        for (int desk = 0; desk < 4 * HELPERS; desk++) {
            barrier_init(desks_full + 8 * desk, 1);
            barrier_init(desks_empty + 8 * desk, 1);
        }
        barrier_init(weights_full, 1);
        barrier_init(weights_empty, 4);
        barriers_are_ready();
    }
    __syncthreads();
    cluster_meet();
    // The same in all threads of a warp, said so that the compiler sees it.
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp < 4) {
        more_registers<240>();
        const int desk = warp * HELPERS;
        compute(
            bias, weights, weights_full, weights_empty, ring,
            {desks + desk * DESK, desks_full + 8 * desk, desks_empty + 8 * desk}, blocks, tiles, rank
        );
    } else if (warp < WARPS) {
        fewer_registers<HELPERS == 2 ? 120 : 72>();
        const int helper = (warp - 4) / 4, desk = warp % 4 * HELPERS + helper;
        const Desk mine = {desks + desk * DESK, desks_full + 8 * desk, desks_empty + 8 * desk};
        serve(mine, blocks, tiles, rank, helper, warp % 4, [&](int column, int row) {
#if PIECE
            hand_out(y, mine, tokens, column, row);
#else
            activate(y, mine, tokens, column, row);
#endif
        });
    } else {
        fewer_registers<24>();
        if (threadIdx.x == 32 * WARPS)
            load(maps, weights, weights_full, weights_empty, ring, blocks, tiles, rank);
        __syncwarp();
    }
    // Nobody goes while others may still write to its memory.
    cluster_meet();
}
