// Sums over tokens of the products of their entries, on NVIDIA's Hopper; sums.py says what it does.
//
// Constants that are put before this file: A, B (eighths of both widths), HALF (float16 in place of bfloat16), SLOTS (of
// steps of tokens) and CLUSTER. What the hardware does is in hopper.cuh.

struct Maps {
    Boxes a, b;
};

// Groups of four warps that multiply, and sixty-fours of rows that one of them has.
constexpr int GROUPS = 2, EACH = B > 208 ? 1 : 2;
// Tokens of a step, columns of a box, and rows of a tile, which has B columns.
constexpr int STEP = 64, WIDE = 64, ROWS = 64 * EACH * GROUPS;
// Boxes of a step: those of rows and of columns, of which the last may have more than belongs to them.
constexpr int BOXES_A = ROWS / WIDE, BOXES_B = (B + WIDE - 1) / WIDE;
constexpr int BOX = STEP * WIDE * 2, SLOT = (BOXES_A + BOXES_B) * BOX;
// Clusters of an irrep of one dimension, and of a component of E. There two programs have other columns, here other rows.
constexpr int LINES = (A + CLUSTER * ROWS - 1) / (CLUSTER * ROWS), PLANES = (2 * A + ROWS - 1) / ROWS;
static_assert(CLUSTER == 2, "a component of E has twice as many columns");

// What a cluster has to do: a tile for each of its programs, of one of the six blocks, over some steps.
struct Item {
    int block, row, column, first, last, slice;
    bool plane;

    __device__ __forceinline__ Item(int tokens, int steps) {
        const int cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER, items = 4 * LINES + 2 * PLANES;
        const int item = cluster % items, number = item - 4 * LINES;
        plane = number >= 0;
        block = plane ? 4 + 2 * (number / PLANES) : item / LINES;
        row = plane ? number % PLANES * ROWS : (item % LINES * CLUSTER + rank) * ROWS;
        column = plane ? rank * B : 0;
        slice = cluster / items;
        first = slice * steps;
        last = min(first + steps, (tokens + STEP - 1) / STEP);
    }
};

struct Ring {
    u32 boxes, full, empty;
};

__device__ __forceinline__ void load(const Maps &maps, const Ring &ring, const Item &item, u32 rank) {
    for (int step = item.first, turn = 0; step < item.last; step++, turn++) {
        const u32 slot = turn % SLOTS, full = ring.full + 8 * slot, target = ring.boxes + slot * SLOT;
        barrier_wait(ring.empty + 8 * slot, turn / SLOTS & 1 ^ 1);
        barrier_expect(full, SLOT);
        for (int box = 0; box < BOXES_A + BOXES_B; box++) {
            const bool left = box < BOXES_A;
            const Boxes &boxes = left ? maps.a : maps.b;
            const int start = left ? item.block * A + item.row : item.block * B + item.column;
            const int column = start + (left ? box : box - BOXES_A) * WIDE;
            // Of E they share the rows, of other irreps the columns: what they share they take turns to load.
            if (left != item.plane)
                load_here(target + box * BOX, boxes, full, column, step * STEP);
            else if (box % CLUSTER == rank)
                load_tokens(target + box * BOX, boxes, full, column, step * STEP);
        }
    }
}

__device__ __forceinline__ void compute(const Ring &ring, const Item &item, float *partial, int group) {
    float sums[EACH][B / 2];
    int turn = 0;
    const auto release = [&](int done) {
        if (threadIdx.x % 32 < CLUSTER) barrier_arrive_at(ring.empty + 8 * (done % SLOTS), threadIdx.x % 32);
    };
    for (int step = item.first; step < item.last; step++, turn++) {
        const u32 slot = turn % SLOTS, rows = ring.boxes + slot * SLOT, columns = rows + BOXES_A * BOX;
        barrier_wait(ring.full + 8 * slot, turn / SLOTS & 1);
        products_begin();
#pragma unroll
        for (int each = 0; each < EACH; each++) {
            const u32 left = rows_operand(rows + (group * EACH + each) * BOX, BOX), right = rows_operand(columns, BOX);
#pragma unroll
            for (int token = 0; token < STEP; token += 16)
                wgmma<B>(sums[each], left + 8 * token, right + 8 * token, upper(WIDE), turn + token > 0);
        }
        products_commit();
        products_wait<1>();
        if (turn) release(turn - 1);
    }
    products_wait<0>();
    if (turn) release(turn - 1);
    // Where this block begins, and its columns.
    const int wide = item.plane ? 2 : 1;
    float *target = partial + ((long long)item.slice * 12 + (item.plane ? 2 * item.block - 4 : item.block)) * (A * B);
    const int line = item.row + group * EACH * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int each = 0; each < EACH; each++) {
        hold(sums[each]);
#pragma unroll
        for (int i = 0; i < B / 2; i += 2) {
            const int row = line + 64 * each + i / 2 % 2 * 8, column = item.column + i / 4 * 8 + threadIdx.x % 4 * 2;
            if (row < wide * A) store_pair(target + row * (wide * B) + column, sums[each][i], sums[each][i + 1]);
        }
    }
}

constexpr int THREADS = 128 * (GROUPS + 1);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    sums(const __grid_constant__ Maps maps, float *partial, int tokens, int steps) {
    extern __shared__ __align__(1024) char memory[];
    const u32 boxes = shared(memory), barriers = boxes + SLOTS * SLOT;
    const Ring ring = {boxes, barriers, barriers + 8 * SLOTS};
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; slot++) {
            barrier_init(ring.full + 8 * slot, 1);
            // All warps that multiply in both multiprocessors.
            barrier_init(ring.empty + 8 * slot, 4 * GROUPS * CLUSTER);
        }
        barriers_are_ready();
    }
    __syncthreads();
    cluster_meet();
    const Item item(tokens, steps);
    // The same in all threads of a warp, said so that the compiler sees it.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group < GROUPS) {
        more_registers<240>();
        compute(ring, item, partial, group);
    } else {
        fewer_registers<24>();
        if (threadIdx.x == 128 * GROUPS) load(maps, ring, item, blockIdx.x % CLUSTER);
        __syncwarp();
    }
    // Nobody goes while others may still write to its memory.
    cluster_meet();
}
