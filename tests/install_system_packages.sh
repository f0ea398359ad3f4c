#!/usr/bin/env bash
# Programs that tests use and pip cannot install: Prometheus and promtool (Debian package `prometheus`), a C++ compiler
# for the CPU kernels, openssl for certificates, and Chromium for the page at `/`. Does nothing when they are there.
set -euo pipefail

packages=()
if ! command -v prometheus > /dev/null || ! command -v promtool > /dev/null; then packages+=(prometheus); fi
if ! command -v g++ > /dev/null; then packages+=(g++); fi
if ! command -v openssl > /dev/null; then packages+=(openssl); fi
if ! command -v chromium > /dev/null && ! command -v google-chrome > /dev/null; then
    packages+=(chromium fonts-dejavu-core)
fi
if [ ${#packages[@]} -eq 0 ]; then exit 0; fi

if ! command -v apt-get > /dev/null; then
    echo "The tests need these programs, please install them: ${packages[*]}" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo > /dev/null; then
        echo "The tests need Debian packages; as root, run: apt-get install ${packages[*]}" >&2
        exit 1
    fi
    as_root=(sudo)
fi

# Debian starts a service when it is installed; the tests start Prometheus themselves, on a port of their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" > /dev/null
    "${as_root[@]}" chmod +x "$policy"
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
"${as_root[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -qq -y --no-install-recommends "${packages[@]}"
