#!/usr/bin/env bash
# Tests and measurements on a GPU machine without a network that has Python 3.12, torch, Triton and transformers.
#
#   benchmarks/gpu_host.sh wheels FOLDER              with a network: collect what such a machine lacks for us
#   benchmarks/gpu_host.sh compare GROUP PEER OUTPUT [bench compare arguments]
#   benchmarks/gpu_host.sh test OUTPUT [pytest arguments]
#   benchmarks/gpu_host.sh run COMMAND [ARGUMENTS]    with our packages to be found
#
# The last three run there, at the root of the repository, with WHEELS=FOLDER (default .whl) in the environment. PEER
# holds payload.tar.xz, the site-packages folder of the peer, and models.tar.xz with the folders l8b and l1b. They are
# unpacked once for each machine, below SCRATCH (default /tmp/tokenmill).
set -euo pipefail
cd "$(dirname "$0")/.."

wheels=(fastapi starlette opentelemetry-api pydantic pydantic-core annotated-types typing-inspection typing-extensions uvicorn
        httptools pyzmq msgspec gguf
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
  tar -xJf "$1/models.tar.xz" -C "$scratch/models"
  wait %%
  touch "$scratch/peer.done"
}

compare() {
  local group=$1 peer=$2 output=$3
  unpack "$peer"
  nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.max.sm --format=csv
  python3 -m tokenmill bench compare --group "$group" --model-8b "$scratch/models/l8b" --model-1b "$scratch/models/l1b" \
    --peer-python python3 --peer-env-file benchmarks/vllm.env \
    --peer-env PYTHONPATH="$scratch/peer" PYTHONPYCACHEPREFIX="$scratch/pycache" VLLM_CACHE_ROOT="$scratch/cache" \
    --output "$output/$group" "${@:4}"
}

case ${1:-} in
  wheels) mkdir -p "$2" && collect "$2" ;;
  compare) install && compare "${@:2}" ;;
  test) install && python3 -m pytest -p no:cacheprovider tests/gpu --junitxml "$2/tests.xml" "${@:3}" ;;
  run) install && "${@:2}" ;;
  *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" && exit 2 ;;
esac
