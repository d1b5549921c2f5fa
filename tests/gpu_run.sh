#!/usr/bin/env bash
# All that needs a GPU, on a machine that has one with Python 3.12 and CuPy but perhaps no network. From the repository
# root: tests, then compute-sanitizer over a part of them, then a short timing. Wheels of what is missing lie in .whl/.
# Usage: tests/gpu_run.sh [FOLDER FOR LOGS]
set -u
logs=${1:-/tmp/cotuned-gpu}
mkdir -p "$logs"
python=${PYTHON:-python3}
pip() { "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target .site "$@" || exit; }
rm -rf .site build
if compgen -G ".whl/*.whl" > /dev/null; then pip .whl/*.whl; fi
export PYTHONPATH="$PWD/.site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-$(mktemp -d)}
pip --no-build-isolation .
failed=0

echo "== tests"
timeout 150 "$python" -m pytest tests/test_bus.py tests/test_bus_cotune.py tests/test_cuda_bus.py tests/test_cuda_sources.py \
  tests/test_entropy_step.py tests/test_upload.py -m "gpu or not gpu" -p no:cacheprovider -rs --durations=6 \
  > "$logs/tests.log" 2>&1 || failed=1
tail -n 40 "$logs/tests.log"

echo "== the daemon on the GPU"
TEST_DEVICE=cuda timeout 300 "$python" -m pytest tests/test_exactly_once.py tests/test_learner.py tests/test_state.py tests/test_recovery.py \
  -k "not refused" -p no:cacheprovider > "$logs/daemon.log" 2>&1 || failed=1
tail -n 12 "$logs/daemon.log"

echo "== compute-sanitizer"
part="(any_length and (11-int32 or 300-int16)) or pools_like or
  cuda and (seed_semantics or gate_rate or reports_are_pooled or runs_of_one or unaligned or direction or holds
  or (float64 and 61441))"
declare -A job
for tool in memcheck racecheck initcheck synccheck; do
  timeout 100 compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest tests/test_bus.py \
    tests/test_bus_cotune.py tests/test_entropy_step.py -m gpu -k "${part//$'\n'/ }" -p no:cacheprovider --timeout 90 \
    > "$logs/$tool.log" 2>&1 &
  job[$tool]=$!
done
for tool in memcheck racecheck initcheck synccheck; do
  wait "${job[$tool]}" && word=silent || { word="FAILED ($?)"; failed=1; }
  echo "$tool: $word; $(grep -h "passed\|failed" "$logs/$tool.log" | tail -n 1); $(tail -n 1 "$logs/$tool.log")"
done

echo "== q_pi_distill_grad"
timeout 200 "$python" -m pytest tests/test_q_pi_distill_grad.py tests/test_cuda_distill.py -m "gpu or not gpu" \
  -p no:cacheprovider -rs > "$logs/distill.log" 2>&1 || failed=1
tail -n 12 "$logs/distill.log"
for tool in memcheck racecheck initcheck synccheck; do
  timeout 60 compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest tests/test_cuda_distill.py -m gpu \
    -k "lie_apart or at_the_edge" -p no:cacheprovider --timeout 55 > "$logs/distill-$tool.log" 2>&1 || failed=1
  echo "$tool: $(tail -n 1 "$logs/distill-$tool.log")"
done

echo "== timing"
timeout 60 "$python" tests/gpu_timing.py > "$logs/timing.log" 2>&1 || failed=1
cat "$logs/timing.log"
exit $failed
