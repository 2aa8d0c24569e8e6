#!/bin/sh
# Runs a bundle's consumer and driver on arm64, emulated by qemu: ids and tolerances must hold there too.
#   tests/bundle/arm64.sh WORK BUNDLE [--server URL --prompt TEXT]
# Installs into WORK alone: a Debian arm64 root with Python (apt with a state of its own, dpkg -x) and arm64 wheels (pip).
# Needs qemu-user-static, apt, dpkg, pip and network access. onnxruntime 1.30 and later crash at import under qemu 7.2.
set -eu
WORK=$(mkdir -p "$1" && cd "$1" && pwd)
[ -f "$2/bundle.json" ] || { echo "$2 is no bundle; make one: hyco-export bundle --out $2" >&2; exit 2; }
BUNDLE=$(cd "$2" && pwd)
shift 2
ROOT=$WORK/root
WHEELS=$WORK/wheels
PACKAGES="python3.11 libstdc++6 libgomp1 ca-certificates"
command -v qemu-aarch64-static >/dev/null || { echo "qemu-aarch64-static is missing: apt-get install qemu-user-static" >&2; exit 2; }

if [ ! -e "$ROOT/.complete" ]; then
    mkdir -p "$WORK/state/lists/partial" "$WORK/cache/archives/partial" "$ROOT"
    : >"$WORK/state/status"
    APT="-o Dir::State=$WORK/state -o Dir::State::status=$WORK/state/status -o Dir::Cache=$WORK/cache
         -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Debug::NoLocking=1 -o APT::Sandbox::User=root"
    # shellcheck disable=SC2086  # options are words
    apt-get $APT -qq update
    # shellcheck disable=SC2086
    apt-get $APT -qq --yes --download-only --no-install-recommends install $PACKAGES
    for package in "$WORK"/cache/archives/*.deb; do dpkg -x "$package" "$ROOT"; done
    touch "$ROOT/.complete"
fi
if [ ! -e "$WHEELS/.complete" ]; then
    "${PYTHON:-python3}" -m pip install --quiet --upgrade --target "$WHEELS" --only-binary :all: \
        --python-version 3.11 --implementation cp --platform manylinux_2_28_aarch64 \
        --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 \
        numpy "onnxruntime==1.27.0" msgspec safetensors tokenizers
    touch "$WHEELS/.complete"
fi
export PYTHONPATH="$WHEELS" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
PYTHON_ARM64="qemu-aarch64-static -L $ROOT $ROOT/usr/bin/python3.11"
$PYTHON_ARM64 -c "import platform; print('running on', platform.machine())"
$PYTHON_ARM64 "$BUNDLE/consumer.py" "$BUNDLE"
if [ $# -gt 0 ]; then
    $PYTHON_ARM64 "$BUNDLE/consumer.py" "$BUNDLE" "$@"
    $PYTHON_ARM64 "$BUNDLE/driver.pyz" chat --bundle "$BUNDLE" "$@"
fi
