// Counting actions below 16: four bits each, so that 32 of them are four words of bit planes and a bin is the popc of a
// minterm. Two ways to the planes: a thread transposes 32 actions of its own (many actions), or a warp takes a ballot
// for each bit of the one action of each lane (few).
//
// entropy_step.cu is the only user; action_t may be of 1, 2, 4 or 8 bytes.

#define PER_VECTOR (16 / ACTION_BYTES)
#define GROUP_VECTORS (2 * ACTION_BYTES)  // 32 actions
#define TINY_THREADS (TINY_ACTIONS / 4 + 32)
#define NO_ACTION 16u
#define MAX_WARPS (STEP_THREADS / 32)
static_assert(N_ACTIONS <= 16, "four bit planes");
static_assert(TINY_ACTIONS == 1024, "eight warps count, and finish reads 16 counts of each code at once");

struct Counts {
    unsigned bins[N_ACTIONS];
    unsigned over;  // bits that no action below 16 has
};

__device__ __forceinline__ uint4 load_vector(const uint4* address)
{
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

// Squeezes 32 actions into four words of eight four-bit codes, in any order.
__device__ __forceinline__ void squeeze(const uint4* vectors, unsigned* codes, unsigned& over)
{
    constexpr int words_per_code_word = GROUP_VECTORS;  // 4 · GROUP_VECTORS words make 4
    const unsigned* words = (const unsigned*)vectors;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        codes[c] = 0;
#pragma unroll
        for (int i = words_per_code_word - 1; i >= 0; --i) {
            const unsigned word = words[c * words_per_code_word + i];
#if ACTION_BYTES == 8
            if (i & 1) { over |= word; continue; }
            over |= word & 0xfffffff0u;
#else
            over |= word & (ACTION_BYTES == 1 ? 0xf0f0f0f0u : ACTION_BYTES == 2 ? 0xfff0fff0u : 0xfffffff0u);
#endif
            codes[c] = codes[c] * 16u + word;  // a multiply-add: the other pipe has enough to do
        }
    }
}

__device__ __forceinline__ void exchange(unsigned& a, unsigned& b, unsigned mask, int shift)
{
    const unsigned first = (a & mask) | ((b << shift) & ~mask);
    b = ((a >> shift) & mask) | (b & ~mask);
    a = first;
}

__device__ __forceinline__ void count_group(const uint4* vectors, Counts& counts)
{
    unsigned p[4];
    squeeze(vectors, p, counts.over);
    exchange(p[0], p[1], 0x55555555u, 1);
    exchange(p[2], p[3], 0x55555555u, 1);
    exchange(p[0], p[2], 0x33333333u, 2);
    exchange(p[1], p[3], 0x33333333u, 2);
#pragma unroll
    for (int bin = 0; bin < N_ACTIONS; ++bin) {
        const unsigned upper = (bin & 4 ? p[2] : ~p[2]) & (bin & 8 ? p[3] : ~p[3]);
        counts.bins[bin] += __popc((bin & 1 ? p[0] : ~p[0]) & (bin & 2 ? p[1] : ~p[1]) & upper);
    }
}

// Counts one tile of the vectors from `first` on; those beyond `n_vectors` are not there.
template <int GROUPS>
__device__ __forceinline__ void count_tile(const uint4* wide, long long first, long long n_vectors, Counts& counts)
{
    constexpr int VECTORS = GROUPS * GROUP_VECTORS;
    const long long left = n_vectors - first;
    const int mine = (int)(left < (1 << 20) ? left : 1 << 20) - (int)threadIdx.x;
    const uint4* own = wide + first + (mine > 0 ? threadIdx.x : 0);
    uint4 vectors[VECTORS];
    unsigned missing = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)  // loaded in any case: loads under a condition would wait for each other
        vectors[v] = load_vector(own + (v * (int)blockDim.x < mine ? v * (int)blockDim.x : 0));
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const unsigned there = v * (int)blockDim.x < mine ? 0xffffffffu : 0u;
        vectors[v].x &= there, vectors[v].y &= there, vectors[v].z &= there, vectors[v].w &= there;
        missing += ~there & PER_VECTOR;
    }
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) count_group(vectors + g * GROUP_VECTORS, counts);
    counts.bins[0] -= missing;  // what was not there counted as 0
}

template <int GROUPS>
__device__ __forceinline__ void count_full_tile(const uint4* own, Counts& counts)
{
    constexpr int VECTORS = GROUPS * GROUP_VECTORS;
    uint4 vectors[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) vectors[v] = load_vector(own + v * blockDim.x);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) count_group(vectors + g * GROUP_VECTORS, counts);
}

// Counts what of the vectors falls to this thread; GROUPS · GROUP_VECTORS loads are under way at a time.
template <int GROUPS>
__device__ __forceinline__ void count_vectors(const uint4* wide, long long n_vectors, Counts& counts)
{
    const long long tile = (long long)GROUPS * GROUP_VECTORS * blockDim.x, stride = tile * gridDim.x;
    long long begin = tile * blockIdx.x;
    for (; begin + tile <= n_vectors; begin += stride) count_full_tile<GROUPS>(wide + begin + threadIdx.x, counts);
    if (begin < n_vectors) count_tile<GROUPS>(wide, begin, n_vectors, counts);
}

// Four actions from `first` on, as far as there are `left`; what is not there, or is not below 16, is no action.
__device__ __forceinline__ void load_four(const action_t* first, int left, unsigned* values)
{
    if (left >= 4 && ((unsigned long long)first & (4 * ACTION_BYTES - 1) & 15) == 0) {
#if ACTION_BYTES == 1
        const unsigned word = *(const unsigned*)first;
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = __byte_perm(word, 0, 0x4440 + i);
#elif ACTION_BYTES == 2
        const uint2 words = *(const uint2*)first;
        values[0] = words.x & 0xffffu, values[1] = words.x >> 16;
        values[2] = words.y & 0xffffu, values[3] = words.y >> 16;
#elif ACTION_BYTES == 4
        const uint4 words = *(const uint4*)first;
        values[0] = words.x, values[1] = words.y, values[2] = words.z, values[3] = words.w;
#else
        const uint4 words = ((const uint4*)first)[0], more = ((const uint4*)first)[1];
        values[0] = words.y ? NO_ACTION : words.x, values[1] = words.w ? NO_ACTION : words.z;
        values[2] = more.y ? NO_ACTION : more.x, values[3] = more.w ? NO_ACTION : more.z;
#endif
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = i < left && first[i] < 16 ? (unsigned)first[i] : NO_ACTION;
}

__device__ __forceinline__ void count_one(action_t action, Counts& counts)
{
#pragma unroll
    for (int bin = 0; bin < N_ACTIONS; ++bin) counts.bins[bin] += action == bin;
}

// The counts of this block: lane `bin` of warp 0 gets that bin's. Fewer than there were actions if one was not below K.
template <int GROUPS, bool ONE_TILE>
__device__ __forceinline__ unsigned count_block(const action_t* actions, long long n)
{
    __shared__ unsigned of_warp[MAX_WARPS][N_ACTIONS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int to_boundary = (int)((16 - ((unsigned long long)actions & 15)) & 15) / ACTION_BYTES;
    const int head = to_boundary < n ? to_boundary : (int)n;
    const long long n_vectors = (n - head) / PER_VECTOR, tail = head + n_vectors * PER_VECTOR;
    Counts counts = {};
    const uint4* wide = (const uint4*)(actions + head);
    if (ONE_TILE && n_vectors == GROUPS * GROUP_VECTORS * blockDim.x) count_full_tile<GROUPS>(wide + threadIdx.x, counts);
    else if (ONE_TILE && n_vectors > 0) count_tile<GROUPS>(wide, 0, n_vectors, counts);
    else if (!ONE_TILE) count_vectors<GROUPS>(wide, n_vectors, counts);
    if (counts.over)
#pragma unroll
        for (int bin = 0; bin < N_ACTIONS; ++bin) counts.bins[bin] = 0;
    if (blockIdx.x == 0 && warp == 0) {  // fewer than a vector before the first boundary, and after the last
        if (lane < head) count_one(actions[lane], counts);
        if (tail + lane < n) count_one(actions[tail + lane], counts);
    }
    unsigned mine = 0;
#pragma unroll
    for (int bin = 0; bin < N_ACTIONS; ++bin) {
        const unsigned sum = warp_sum(counts.bins[bin]);
        if (lane == bin) mine = sum;
    }
    if (blockDim.x == 32) return mine;
    if (lane < N_ACTIONS) of_warp[warp][lane] = mine;
    __syncthreads();
    if (warp > 0 || lane >= N_ACTIONS) return 0;
    mine = 0;
    for (int w = 0; w < blockDim.x >> 5; ++w) mine += of_warp[w][lane];
    return mine;
}

// The lanes with one of these bits; in C it takes four instructions, for the compiler shifts the bit down first.
__device__ __forceinline__ unsigned ballot_of_bits(unsigned value, unsigned mask)
{
    unsigned lanes;
    asm volatile("{ .reg .pred has; .reg .b32 bits; and.b32 bits, %1, %2; setp.ne.u32 has, bits, 0;"
                 " vote.sync.ballot.b32 %0, has, 0xffffffff; }" : "=r"(lanes) : "r"(value), "r"(mask));
    return lanes;
}

// Four actions a thread: what lane `code` counts in its warp, lanes 16 to 31 in the second pair of each thread.
__device__ __forceinline__ unsigned count_four(const action_t* actions, int n)
{
    const int lane = threadIdx.x & 31;
    unsigned values[4], planes[2][5];
    load_four(actions + 4 * threadIdx.x, n - 4 * (int)threadIdx.x, values);
    const bool second = lane & 16;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int bit = 0; bit < 5; ++bit) {
            const unsigned mask = bit < 4 ? 1u << bit : ~15u;
            const unsigned of_first = ballot_of_bits(values[i], mask), of_second = ballot_of_bits(values[2 + i], mask);
            planes[i][bit] = second ? of_second : of_first;
        }
    const unsigned x0 = lane & 1 ? 0 : ~0u, x1 = lane & 2 ? 0 : ~0u, x2 = lane & 4 ? 0 : ~0u, x3 = lane & 8 ? 0 : ~0u;
    unsigned count = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        count += __popc((planes[i][0] ^ x0) & (planes[i][1] ^ x1) & (planes[i][2] ^ x2) & (planes[i][3] ^ x3)
                        & ~planes[i][4]);
    return count;
}
