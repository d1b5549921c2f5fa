// What every kernel of the bus shares; the loader puts it before each .cu file, after the injected constants.
//
// The bus is one allocation of max_runs records, ROW_BYTES apart. A record holds, at fixed offsets, a run's
//   slots      float32   [n_slots]                       at 0
//   counters   long long [N_COUNTERS]                    at ROW_COUNTERS
//   pool       long long [N_ACTIONS + N_POOL_COLUMNS]    at ROW_POOL
//   parameters double    [N_PARAMETERS]                  at ROW_PARAMETERS
// so that one copy of ROW_BYTES moves everything that is known of a run.

struct Row {
    float* slots;
    long long* counters;
    long long* pool;
    const double* parameters;
};

__device__ __forceinline__ Row row_at(unsigned char* bus, long long row)
{
    unsigned char* record = bus + row * ROW_BYTES;
    return {(float*)record, (long long*)(record + ROW_COUNTERS), (long long*)(record + ROW_POOL),
            (const double*)(record + ROW_PARAMETERS)};
}

// CuPy compiles with -ftz=true, and then the plain conversions turn subnormal floats into 0. A slot that all-Hold
// decays into the subnormals is still *set*; these two keep its bits, as NumPy does.
__device__ __forceinline__ double widen(float value)
{
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(value));
    return wide;
}

__device__ __forceinline__ float narrow(double value)
{
    float single;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(single) : "d"(value));
    return single;
}

// The rule of slots 420 and 583, where 0.0 means unset: the first value other than 0 is taken whole.
// With `counted` the rule of the slots where 0.0 is a value like any other: the first of `seen` is taken whole.
__device__ __forceinline__ float blended(float slot, double value, double blend, bool counted, long long seen)
{
    const bool unset = counted ? seen == 0 : widen(slot) == 0.0;
    return narrow(unset ? value : (1.0 - blend) * widen(slot) + blend * value);
}
