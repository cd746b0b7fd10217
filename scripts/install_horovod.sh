#!/usr/bin/env bash
# Installs Horovod 0.28.1 (PyTorch, Gloo) next to the torch of a Python interpreter.
#
#   scripts/install_horovod.sh [--mpi] [PYTHON]      PYTHON: an interpreter that has torch, python3 by default
#
#   --mpi   builds with MPI as well, for jobs that mpirun starts; needs libopenmpi-dev or a similar package
#
# The last release of Horovod asks for C++14, and torch 2.1 and later need C++17: that one compiler option is replaced,
# nothing else. Building takes two to five minutes on two cores. The wheel is kept in
# ${XDG_CACHE_HOME:-~/.cache}/lightning-safusion/horovod, one for each Python, torch and option, and installed from
# there the next time. Nothing is done where this Horovod works already.
set -euo pipefail

version=0.28.1
with_mpi=HOROVOD_WITHOUT_MPI
flavour=gloo
if [ "${1:-}" = --mpi ]; then
  with_mpi=HOROVOD_WITH_MPI
  flavour=mpi
  shift
fi
python=${1:-python3}
case $python in
  */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;;  # it is used from other folders too
esac

if ! key=$("$python" -c '
import sys, sysconfig, torch
print(f"{sys.implementation.cache_tag}-torch{torch.__version__}-{sysconfig.get_platform()}")' 2>/dev/null); then
  echo "$python has no torch: install torch first, Horovod is compiled for one version of it" >&2
  exit 1
fi

works() {
  (cd / && "$python" -c "
import horovod, horovod.torch as hvd
raise SystemExit(horovod.__version__ != '$version' or ('$flavour' == 'mpi' and not hvd.mpi_built()))" 2>/dev/null)
}

if works; then
  echo "Horovod $version is already installed for $python"
  exit 0
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/lightning-safusion/horovod/$key-$flavour
wheel() { find "$cache" -name "horovod-$version-*.whl" 2>/dev/null | head -n 1; }
pip() { "$python" -m pip --disable-pip-version-check "$@"; }

build() {
  local compiler
  compiler=$(command -v "${CXX:-c++}") || { echo "Horovod needs a C++17 compiler (g++)" >&2; exit 2; }
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT  # not local: it runs when the function is gone
  printf '#!/bin/bash\nexec %q "${@/#-std=*14/-std=c++17}"\n' "$compiler" >"$work/cxx17"
  chmod +x "$work/cxx17"
  # Tools of the build stay out of the environment.
  pip install -q --target "$work/tools" 'setuptools<81' wheel packaging 'cmake<4'
  echo "Building Horovod $version for $key ($flavour): two to five minutes on two cores" >&2
  # Without MAKEFLAGS Horovod starts eight compilers at once, of over 1 GB each.
  env PYTHONPATH="$work/tools" PATH="$work/tools/bin:$PATH" CXX="$work/cxx17" \
    MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
    HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 "$with_mpi=1" \
    "$python" -m pip --disable-pip-version-check wheel --no-build-isolation --no-deps --no-cache-dir \
    --wheel-dir "$work/wheel" "horovod==$version" >"$work/log" 2>&1 \
    || { tail -n 60 "$work/log" >&2; echo "Horovod $version could not be built" >&2; exit 3; }
  mkdir -p "$cache"
  for built in "$work"/wheel/*.whl; do
    # Under another name first: whoever finds a wheel finds a whole one.
    cp "$built" "$cache/.partial.$$" && mv "$cache/.partial.$$" "$cache/$(basename "$built")"
  done
}

if [ -z "$(wheel)" ]; then
  build
fi
pip install -q --force-reinstall --no-deps "$(wheel)"
pip install -q 'cloudpickle' 'psutil' 'pyyaml' 'packaging'
works || { echo "Horovod $version was installed, but horovod.torch cannot be imported:" >&2
  "$python" -c 'import horovod.torch' >&2 || true; exit 4; }
echo "Horovod $version is installed for $python"
