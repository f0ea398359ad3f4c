#!/usr/bin/env bash
# Tests and measurements on a GPU machine without a network that has Python 3.12, torch, Triton and transformers.
#
#   benchmarks/gpu_host.sh wheels FOLDER              with a network: collect what such a machine lacks for us
#   benchmarks/gpu_host.sh compare GROUP PEER OUTPUT [bench compare arguments]
#   benchmarks/gpu_host.sh parallel GPUS PEER OUTPUT [PARTS]   all there is to test and measure on 2 or 4 GPUs of one host
#   benchmarks/gpu_host.sh test OUTPUT [pytest arguments]
#   benchmarks/gpu_host.sh run COMMAND [ARGUMENTS]    with our packages to be found
#
# All but the first run there, at the root of the repository, with WHEELS=FOLDER (default .whl) in the environment. PEER
# holds payload.tar.xz, the site-packages folder of the peer, and models.tar.xz with the folders l8b and l1b. They are
# unpacked once for each machine, below SCRATCH (default /tmp/tokenmill).
#
# PARTS are tests, all_reduce, preemption and groups of bench compare; by default tests all_reduce tp2 pp2 dp2 preemption
# or, with 4 GPUs, tests all_reduce tp4 tp4-70b dp4. Each takes less than ten minutes, all together up to an hour: where
# a command may not take so long, give each call some of them. What a part prints comes to OUTPUT/PART.txt, tables to
# OUTPUT/result-GROUP.json, logs of both sides to OUTPUT/logs.tar.gz.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels=(fastapi starlette opentelemetry-api pydantic pydantic-core annotated-types typing-inspection typing-extensions uvicorn
        httptools fastokens pyzmq msgspec gguf pillow blake3 av xgrammar llguidance apache-tvm-ffi
        setproctitle pytest-asyncio)
scratch=${SCRATCH:-/tmp/tokenmill}

collect() {
  local version name platforms=()
  for version in 39 35 34 31 28 27 26 24 17 12 5; do platforms+=(--platform "manylinux_2_${version}_x86_64"); done
  for name in "${wheels[@]}"; do
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
      --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 --platform any \
      --constraint <(sed -n "/^${name}==/Ip" constraints.txt) --dest "$1" "$name"
  done
}

install() {
  if [ ! -e "$scratch/site.done" ]; then
    python3 -m pip install --quiet --no-index --no-deps --no-cache-dir --target "$scratch/site" "${WHEELS:-.whl}"/*.whl
    touch "$scratch/site.done"
  fi
  export PYTHONPATH=$scratch/site:$PWD/server:$PWD/engine_core:$PWD/kernels PYTHONUNBUFFERED=1
  unset PYTHONDONTWRITEBYTECODE
}

unpack() {
  [ -e "$scratch/peer.done" ] && return
  mkdir -p "$scratch/peer" "$scratch/models"
  tar -xJf "$1/payload.tar.xz" -C "$scratch/peer" &
  local payload=$!
  tar -xJf "$1/models.tar.xz" -C "$scratch/models"
  python3 -m benchmarks.shapes 70b "$scratch/models/l8b" "$scratch/models/l70b"
  wait "$payload"
  touch "$scratch/peer.done"
}

bandwidth() { # of one card in GB/s, as its maker states it
  case $(nvidia-smi --query-gpu=name --format=csv,noheader --id=0) in
    *H200*) echo 4800 ;;
    *) echo 3350 ;;
  esac
}

compare() {
  local group=$1 peer=$2 output=$3
  unpack "$peer"
  [ "$group" != media7b ] || python3 -m benchmarks.media_shapes vl7b "$scratch/models/vl7b"
  nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.max.sm --format=csv
  python3 -m tokenmill bench compare --group "$group" --model-8b "$scratch/models/l8b" --model-1b "$scratch/models/l1b" \
    --model-70b "$scratch/models/l70b" --model-vl7b "$scratch/models/vl7b" --memory-bandwidth "$(bandwidth)" \
    --peer-python python3 --peer-env-file benchmarks/vllm.env \
    --peer-env PYTHONPATH="$scratch/peer" PYTHONPYCACHEPREFIX="$scratch/pycache" VLLM_CACHE_ROOT="$scratch/cache" \
    --output "$output/$group" "${@:4}"
}

run_part() {
  case $1 in
    tests) python3 -m pytest -p no:cacheprovider -v --durations=20 \
      tests/gpu/test_stages.py tests/gpu/test_peer_reduce.py tests/gpu/test_parallel.py tests/gpu/test_pipeline.py ;;
    all_reduce) python3 -m benchmarks.all_reduce --size "$2" ;;
    preemption) unpack "$3" && python3 -m benchmarks.preemption --setting gpu --model "$scratch/models/l8b" ;;
    tp2 | tp4) compare "$1" "$3" "$scratch/results" --rounds 2 ;;
    *) compare "$1" "$3" "$scratch/results" --rounds 1 ;; # several long starts of the peer, or one very long one
  esac
}

parallel() {
  local gpus=$1 peer=$2 output=$3 parts=("${@:4}") part status=0
  if [ ${#parts[@]} = 0 ]; then
    case $gpus in
      2) parts=(tests all_reduce tp2 pp2 dp2 preemption) ;;
      4) parts=(tests all_reduce tp4 tp4-70b dp4) ;;
      *) echo "there are parts for 2 and for 4 GPUs, not for $gpus: name some" >&2 && return 2 ;;
    esac
  fi
  mkdir -p "$output" "$scratch/results"
  nvidia-smi topo -m || true
  for part in "${parts[@]}"; do
    run_part "$part" "$gpus" "$peer" 2>&1 | tee "$output/$part.txt" || status=1
    # Packed after each part: what is stopped keeps the rest.
    cp "$scratch/results"/*/result-*.json "$output" 2>/dev/null || true
    tar -czf "$output/logs.tar.gz" -C "$scratch/results" .
  done
  return $status
}

case ${1:-} in
  wheels) mkdir -p "$2" && collect "$2" ;;
  compare) install && compare "${@:2}" ;;
  parallel) install && parallel "${@:2}" ;;
  test) install && python3 -m pytest -p no:cacheprovider tests/gpu --junitxml "$2/tests.xml" "${@:3}" ;;
  run) install && "${@:2}" ;;
  *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" && exit 2 ;;
esac
