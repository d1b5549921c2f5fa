#!/usr/bin/env bash
# Builds the images with buildah and runs the daemon in one, without a Docker engine.
# Usage: tests/container/build_and_run.sh BASE_IMAGE [TARGET …]      (default targets: cpu demo)
# What pip needs behind a proxy or a private index: BUILD_OPTIONS="--volume /etc/ssl/certs:/etc/ssl/certs:ro --env …"
set -euo pipefail
cd "$(dirname "$0")/../.."
base=${1:?"usage: $0 BASE_IMAGE [TARGET …]"}; shift
targets=("$@"); [ ${#targets[@]} -gt 0 ] || targets=(cpu demo)
export BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot} STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}
read -ra options <<< "${BUILD_OPTIONS:-}"

for target in "${targets[@]}"; do
  began=$SECONDS
  buildah build --quiet --format docker --build-arg "PYTHON_IMAGE=$base" --target "$target" "${options[@]}" \
    --tag "cotuned:$target" . > /dev/null
  echo "built cotuned:$target in $((SECONDS - began)) s: $(buildah images --format '{{.Size}}' "localhost/cotuned:$target")"
done

container=$(buildah from "localhost/cotuned:${targets[0]}")
log=$(mktemp)
daemon=""  # not 0: that would be our whole process group
trap '[ -z "$daemon" ] || kill "$daemon" 2> /dev/null || true; buildah rm "$container" > /dev/null; rm -f "$log"' EXIT
inside() { buildah run --user 10001:10001 "$container" -- "$@"; }

echo "user: $(inside id)"
for tool in gcc cc g++ make; do
  ! inside sh -c "command -v $tool" > /dev/null 2>&1 || { echo "there is a $tool in the image"; exit 1; }
done
echo "no compiler in the image"
inside sh -c 'touch /var/cache/cotuned/x /var/lib/cotuned/x && rm /var/cache/cotuned/x /var/lib/cotuned/x'
echo "kernel cache and state folder are writable"

# The exit code goes to a file: buildah's own chroot helper stands between us and the daemon.
inside sh -c 'cotuned serve 2>&1 & pid=$!; echo $pid > /run/cotuned/pid; wait $pid; code=$?; echo "exit code $code"' > "$log" &
daemon=$!
for _ in $(seq 100); do grep -q '"ready"' "$log" && break; sleep 0.1; done
grep '"ready"' "$log" || { echo "the daemon did not start:"; cat "$log"; exit 1; }
inside cotuned status --timeout 2 > /dev/null && echo "health check: exit code 0"
inside python3 -c '
from cotuned.client import ActorClient, LearnerClient
with ActorClient() as actor, LearnerClient() as learner:
    for _ in range(20):
        actor.push([5] * 64)
    actor.flush()
    print("client:", learner.cotune(0).reason)
'
began=$(date +%s%N)
inside sh -c 'kill -TERM $(cat /run/cotuned/pid)'
wait "$daemon"
echo "SIGTERM: $(grep 'exit code' "$log") after $(( ($(date +%s%N) - began) / 1000000 )) ms"
grep -q 'exit code 0' "$log"
inside cotuned state show
inside cotuned state show --json | grep -q '"run": "default"'
if inside cotuned status --timeout 1 > /dev/null 2>&1; then echo "a stopped daemon is healthy"; exit 1; fi
echo "health check of a stopped daemon: exit code not 0"

# As the compose file runs it. podman sees buildah's images; it needs rights that not every machine gives.
hardening=(--network none --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --no-healthcheck)
image=localhost/cotuned:${targets[0]}
podman run --rm "${hardening[@]}" --entrypoint cotuned "$image" --version > /dev/null 2>&1 \
  || { echo "skipped, since podman cannot run containers here: the daemon as process 1, hardened"; exit 0; }
hardened=$(podman run --detach "${hardening[@]}" --entrypoint cotuned "$image" serve)
trap 'podman rm --force "$hardened" > /dev/null; buildah rm "$container" > /dev/null; rm -f "$log"' EXIT
for _ in $(seq 50); do podman exec "$hardened" cotuned status --timeout 1 > /dev/null 2>&1 && break; sleep 0.2; done
podman exec "$hardened" sh -c 'touch /var/cache/cotuned/x /var/lib/cotuned/x && ! touch /x 2> /dev/null \
  && tr "\0" " " < /proc/1/cmdline && echo && grep -E "^(Uid|CapEff|NoNewPrivs)" /proc/1/status'
began=$(date +%s%N)
podman stop --time 10 "$hardened" > /dev/null  # SIGKILL after 10 s, which would be exit code 137
code=$(podman inspect --format '{{.State.ExitCode}}' "$hardened")
echo "hardened, as process 1: SIGTERM: exit code $code after $(( ($(date +%s%N) - began) / 1000000 )) ms"
[ "$code" = 0 ]
