#!/usr/bin/env bash
# All that needs a GPU, tested: `make test-gpu` sets up a Python and runs this. From the repository root, with a $PYTHON
# that imports the installed package, CuPy, pytest and pytest-xdist:
#   1. every test marked `gpu` or `daemon` (the latter start real daemons: here on the GPU, TEST_DEVICE=cuda);
#   2. the four tools of compute-sanitizer over a part of every kernel family.
# What daemons do with sockets, keys and disks is the same over any bus: those files are left to `make test`.
# Fails if anything fails, or is not there to be run. Logs go to a folder, one file each.
# Usage: tests/gpu_run.sh [FOLDER FOR LOGS]
#        tests/gpu_run.sh --parts      what compute-sanitizer looks at: family | file | pytest's -k expression
# Environment: PYTHON; JOBS, processes at a time (default: one a core); COMPUTE_SANITIZER (default: from the PATH).
set -u

# compute-sanitizer slows a kernel down up to a hundredfold, so it gets few sizes, but every kernel and every way
# through it: one block and many, one piece and many, aligned or not, few actions and many, masks, edge values.
parts=(
  "drain|tests/test_bus.py|cuda and (seed_semantics or gate_rate or reports_are_pooled or runs_of_one or unaligned \
or (float64 and 61441))"
  "entropy_step|tests/test_entropy_step.py|(any_length and 11-int32) or (pools_like and 11) or (one_hot and 16)"
  "entropy_step_wide|tests/test_entropy_step.py|(any_length and 300-int16) or (pools_like and 300)"
  "sac_cotune|tests/test_bus_cotune.py|cuda and (direction or holds or other_sources)"
  "q_pi_distill_grad|tests/test_cuda_distill.py|lie_apart or at_the_edge or follows_sac_cotune"
)
tools=(memcheck racecheck synccheck initcheck)
ignored=()
for name in curve failing_disk fuzz http ipc_modes keygen; do ignored+=("--ignore=tests/test_$name.py"); done

if [[ ${1:-} == --parts ]]; then
  printf '%s\n' "${parts[@]}"
  exit 0
fi

mkdir -p "${1:-out/test-gpu}"
logs=$(cd "${1:-out/test-gpu}" && pwd)
rm -f "$logs"/*.log
python=${PYTHON:-python3}
jobs=${JOBS:-$(env -u OMP_NUM_THREADS nproc)}  # nproc obeys OMP_NUM_THREADS, which the Makefile sets
export PYTHONUNBUFFERED=1 CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-$logs/cupy}
trap 'kill $(jobs -p) 2> /dev/null' EXIT
failed=0

gpu='import cupy; print(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode() + ", CuPy", cupy.__version__)'
if ! "$python" -c "$gpu" 2> "$logs/gpu.log"; then
  tail -n 1 "$logs/gpu.log" >&2
  echo "test-gpu: $python finds no GPU; it needs an NVIDIA driver and a CuPy for it (CUDA=12 or CUDA=13)" >&2
  exit 1
fi

begin=$SECONDS
workers=$((jobs > 12 ? 12 : jobs))
echo "== tests marked gpu or daemon, $workers at a time, daemons on the GPU"
TEST_DEVICE=cuda timeout --foreground 420 "$python" -m pytest -m "gpu or daemon" -n "$workers" --dist worksteal \
  "${ignored[@]}" -p no:cacheprovider -v -rs --durations=8 > "$logs/tests.log" 2>&1 || failed=1
tail -n 40 "$logs/tests.log"
echo "($((SECONDS - begin)) s)"

sanitizer=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
if ! "$sanitizer" --version > "$logs/sanitizer.log" 2>&1; then
  echo "test-gpu: $sanitizer does not run, so nothing was looked at by it. It comes with the CUDA toolkit (NVIDIA's apt" \
    "package cuda-sanitizer-13-0 has it alone); put it on the PATH, or name it: COMPUTE_SANITIZER=…" >&2
  exit 1
fi

begin=$SECONDS
echo "== compute-sanitizer, $jobs at a time; a part of every kernel family, for it slows a kernel down a hundredfold"
declare -A job
for part in "${parts[@]}"; do
  IFS='|' read -r family file expression <<< "$part"
  for tool in "${tools[@]}"; do
    while (($(jobs -rp | wc -l) >= jobs)); do sleep 0.2; done
    timeout 240 "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" -m pytest "$file" -m gpu -k "$expression" \
      -p no:cacheprovider -p no:xdist --timeout 200 > "$logs/$family-$tool.log" 2>&1 &
    job[$family-$tool]=$!
  done
done
for part in "${parts[@]}"; do
  IFS='|' read -r family file expression <<< "$part"
  echo "$family: $file -k \"$expression\""
  for tool in "${tools[@]}"; do
    wait "${job[$family-$tool]}"
    code=$?
    tests=$(grep -E "^[0-9]+ (passed|failed|skipped|error|deselected).* in [0-9.]+s" "$logs/$family-$tool.log" | tail -n 1)
    # Where a tool does not support the GPU, tests skip and pytest ends well: that is no result.
    if [[ $code == 0 && $tests == *passed* && $tests != *skipped* ]]; then
      word=silent
    else
      word="FAILED (exit code $code)" failed=1
    fi
    printf '  %-10s %s; %s\n' "$tool" "$word" "$tests"
  done
done
echo "($((SECONDS - begin)) s)"
if ((failed)); then echo "test-gpu: FAILED; logs: $logs"; else echo "test-gpu: all passed; logs: $logs"; fi
exit $failed
