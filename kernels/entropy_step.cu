// entropy_step: one batch of executed actions that lies on the device, from indices to slot 583, in one launch. K ≤ 16.
//
//   record   the run's record of the bus (isv_bus.cuh)
//   actions  action_t [n], n ≥ 1, aligned to its own size; signed types come as the unsigned ones of their width
//   mail     unsigned long long [1 + N_ACTIONS · gridDim.x], zero before the first launch: the epoch, then one message
//            (epoch << 32 | count) for each bin and block, bin after bin
//
// An index outside [0, K) leaves only BATCHES_REJECTED changed. Fewer than pool_min actions, with those pooled before,
// become the run's pool; else one observation is made of them all.
//
// Idea: an action below 16 is four bits. A thread squeezes 32 of them into four words, transposes these into bit
// planes (bit j of 32 actions in one word), and counts a bin as the popc of its minterm: two or three operations an
// action where counting in bytes takes ten, so that even bytes arrive no faster than they are counted. Blocks do not
// meet: each writes its counts as messages that carry the epoch of the launch, and the last block, the only one that
// waits, reads until all have it. An 8-byte store is seen whole or not at all, so no fence and no counter is needed;
// and since no other block waits, all come to their end on however few multiprocessors, if only there is room for two.

static_assert(COUNTER_BATCHES_PREFILL == COUNTER_BATCHES_TRAIN + 1, "found by adding `prefill`");
static_assert(COUNTER_ACTIONS_PREFILL == COUNTER_ACTIONS_TRAIN + 1, "found by adding `prefill`");

// What the row held before, spread over the lanes of warp 0. One load each, issued before those of the actions; that
// the lanes load different things keeps the compiler from waiting for values that it takes for uniform.
struct Before {
    long long own;           // of lanes 0 to 4: the Look of that number
    long long pooled_count;  // of lane `bin`
    float slot;
};

enum Look { LOOK_BLEND, LOOK_POOLED, LOOK_OBSERVATIONS, LOOK_BATCHES, LOOK_ACTIONS };

__device__ __forceinline__ long long* looked_at(const Row& row, int lane, int prefill)
{
    int counter = COUNTER_OBSERVATIONS;  // in units of 8 bytes from the counters on
    counter = lane == LOOK_BATCHES ? COUNTER_BATCHES_TRAIN + prefill : counter;
    counter = lane == LOOK_ACTIONS ? COUNTER_ACTIONS_TRAIN + prefill : counter;
    counter = lane == LOOK_POOLED ? (ROW_POOL - ROW_COUNTERS) / 8 + N_ACTIONS + POOL_ACTIONS : counter;
    counter = lane == LOOK_BLEND ? (ROW_PARAMETERS - ROW_COUNTERS) / 8 + PARAM_EMA_BLEND : counter;
    return row.counters + counter;
}

__device__ __forceinline__ Before look_up(const Row& row, int prefill)
{
    const int lane = threadIdx.x & 31;
    Before before;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(before.own) : "l"(looked_at(row, lane, prefill)));
    asm volatile("ld.global.b64 %0, [%1];"
                 : "=l"(before.pooled_count) : "l"(row.pool + (lane < N_ACTIONS ? lane : N_ACTIONS)));
    asm volatile("ld.global.f32 %0, [%1];"
                 : "=f"(before.slot) : "l"(row.slots + SLOT_RL_ACTION_ENTROPY_EMA_INDEX + (lane == 31)));
    return before;
}

// What can be known of an observation before its counts are.
struct Prepared {
    double blend, kept, per_action, ln_total;
    long long pooled, total;
};

__device__ __forceinline__ Prepared prepare(const Before& before, long long n)
{
    const double blend = __longlong_as_double(__shfl_sync(FULL_WARP, before.own, LOOK_BLEND));
    const long long pooled = __shfl_sync(FULL_WARP, before.own, LOOK_POOLED), total = n + pooled;
    return {blend, (1.0 - blend) * widen(before.slot), reciprocal_of(whole(total)), ln_whole(whole(total)), pooled, total};
}

// One warp, from the counts of the batch (lane `bin` has that bin's) to the row.
__device__ __forceinline__ void finish(const Row& row, const Before& before, const Prepared& prepared, bool valid,
                                       long long count, long long n, long long pool_min, int prefill)
{
    const int lane = threadIdx.x & 31;
    const long long pooled_count = lane < N_ACTIONS ? count + before.pooled_count : 0;
    const double entropy = nats(warp_sum_wide(entropy_units(pooled_count, prepared.per_action, prepared.ln_total)));
    if (__builtin_expect(!valid, 0)) {
        if (lane == 0) row.counters[COUNTER_BATCHES_REJECTED] += 1;
        return;
    }
    const bool complete = prepared.total >= pool_min;
    if (complete && lane < 2) {
        const bool whole_value = lane == 0 || widen(before.slot) == 0.0;
        row.slots[lane == 0 ? SLOT_ACTION_ENTROPY : SLOT_RL_ACTION_ENTROPY_EMA_INDEX] =
            narrow(whole_value ? entropy : prepared.kept + prepared.blend * entropy);
    }
    if (lane == LOOK_BATCHES || lane == LOOK_ACTIONS || (lane == LOOK_OBSERVATIONS && complete))
        *looked_at(row, lane, prefill) = before.own + (lane == LOOK_ACTIONS ? n : 1);
    if (__builtin_expect(complete && prepared.pooled == 0, 1)) return;
    if (complete && lane == 0) observe_pooled_reports(row);
    __syncwarp();
    if (lane < N_ACTIONS) row.pool[lane] = complete ? 0 : pooled_count;
    if (complete && lane < N_POOL_COLUMNS) row.pool[N_ACTIONS + lane] = 0;
    if (!complete && lane == 0) row.pool[N_ACTIONS + POOL_ACTIONS] = prepared.total;
}

__device__ __forceinline__ void send(unsigned long long* to, unsigned long long message)
{
    asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(to), "l"(message) : "memory");
}

__device__ __forceinline__ unsigned long long look(const unsigned long long* at)
{
    unsigned long long message;
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(message) : "l"(at) : "memory");
    return message;
}

// The last block: counts of all blocks; lane `bin` of warp 0 gets that bin's. Eight looks of a lane are under way at a
// time: one after the other they would cost as much as all the counting.
__device__ __forceinline__ unsigned long long collect(const unsigned long long* messages, unsigned epoch)
{
    __shared__ unsigned long long sums[N_ACTIONS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, blocks = gridDim.x;
    for (int bin = warp; bin < N_ACTIONS; bin += warps) {
        unsigned long long sum = 0;
        for (int first = lane; first < blocks; first += 8 * 32) {
            unsigned long long found[8];
            bool missing;
            do {
                missing = false;
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    found[i] = first + 32 * i < blocks ? look(messages + bin * blocks + first + 32 * i)
                                                       : (unsigned long long)epoch << 32;
#pragma unroll
                for (int i = 0; i < 8; ++i) missing |= (unsigned)(found[i] >> 32) != epoch;
            } while (missing);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += (unsigned)found[i];
        }
        sum = warp_sum_wide(sum);
        if (lane == 0) sums[bin] = sum;
    }
    __syncthreads();
    return threadIdx.x < N_ACTIONS ? sums[threadIdx.x] : 0;
}

// One block, no more than four actions a thread. The last warp counts nothing; it knows the row and the logarithms when
// the counts come.
extern "C" __global__ void __launch_bounds__(TINY_THREADS, 1)
step_tiny(unsigned char* record, const action_t* actions, long long n, unsigned long long* mail, long long pool_min,
          int prefill)
{
    __shared__ __align__(16) unsigned char table[16][16];  // [code][warp, pair]
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (warp == TINY_THREADS / 32 - 1) {
        const Row row = row_at(record, 0);
        const Before before = look_up(row, prefill);
        Prepared prepared = prepare(before, n);
        prepared.kept = __shfl_sync(FULL_WARP, prepared.kept, 0);  // all lanes have the same: this only says that these
        prepared.per_action = __shfl_sync(FULL_WARP, prepared.per_action, 0);  // are computed now, before the counts
        prepared.ln_total = __shfl_sync(FULL_WARP, prepared.ln_total, 0);      // come, and not after
        asm volatile("bar.sync 1, %0;" ::"n"(TINY_THREADS) : "memory");
        const uint4 counts = *(const uint4*)table[lane & 15];
        unsigned count = __dp4a(counts.x, 0x01010101u, __dp4a(counts.y, 0x01010101u, 0u));
        count += __dp4a(counts.z, 0x01010101u, __dp4a(counts.w, 0x01010101u, 0u));
        count = lane < N_ACTIONS ? count : 0;
        finish(row, before, prepared, warp_sum(count) == (unsigned)n, count, n, pool_min, prefill);
        return;
    }
    table[lane & 15][2 * warp + (lane >> 4)] = (unsigned char)count_four(actions, (int)n);
    asm volatile("bar.arrive 1, %0;" ::"n"(TINY_THREADS) : "memory");
}

// One block, no more than 32 actions a thread.
extern "C" __global__ void __launch_bounds__(STEP_THREADS, 1)
step_small(unsigned char* record, const action_t* actions, long long n, unsigned long long* mail, long long pool_min,
           int prefill)
{
    const Row row = row_at(record, 0);
    const Before before = look_up(row, prefill);
    const unsigned count = count_block<1, true>(actions, n);
    if (threadIdx.x >= 32) return;
    const bool valid = (long long)warp_sum_wide(count) == n;
    finish(row, before, prepare(before, n), valid, count, n, pool_min, prefill);
}

extern "C" __global__ void __launch_bounds__(STEP_THREADS, STEP_BLOCKS)
step_large(unsigned char* record, const action_t* actions, long long n, unsigned long long* mail, long long pool_min,
           int prefill)
{
    const unsigned epoch = (unsigned)look(mail) + 1;
    const unsigned count = count_block<STEP_GROUPS, false>(actions, n);
    if (threadIdx.x < N_ACTIONS)
        send(mail + 1 + threadIdx.x * gridDim.x + blockIdx.x, (unsigned long long)epoch << 32 | count);
    if (blockIdx.x + 1 < gridDim.x) return;
    const Row row = row_at(record, 0);
    const Before before = look_up(row, prefill);
    const Prepared prepared = prepare(before, n);
    const unsigned long long all = collect(mail + 1, epoch);
    if (threadIdx.x == 0) send(mail, epoch);
    if (threadIdx.x >= 32) return;
    const bool valid = (long long)warp_sum_wide(all) == n;
    finish(row, before, prepared, valid, (long long)all, n, pool_min, prefill);
}
