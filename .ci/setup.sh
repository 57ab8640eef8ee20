#!/usr/bin/env bash
# Makes .venv from constraints.txt, installs burnish into it, and brings up the Docker engine and its base image.
#
# Safe to repeat: a part whose inputs have not changed is skipped, so a second run takes a second. Needs Python 3.11 or
# newer, `make` and a package index; on Debian as root it installs what is missing from apt.
set -eu -o pipefail
cd "$(dirname "$0")/.."

# where a machine without an NVIDIA driver finds torch without CUDA; a machine that has its own wheels never asks
TORCH_CPU_INDEX=${BURNISH_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

find_python() {
  local name
  for name in "${BURNISH_PYTHON:-}" python3.11 python3 python3.12; do
    [ -n "$name" ] && command -v "$name" >/dev/null || continue
    "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && { echo "$name"; return; }
  done
  return 1
}

apt_install() { # package...
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  say "installing $* from apt"
  apt-get update -qq >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null 2>&1
}

make_venv() {
  local python
  python=$(find_python) || { apt_install python3 python3-venv && python=$(find_python); } ||
    die "Python 3.11 or 3.12 is needed; install it or name it in BURNISH_PYTHON"
  if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear .venv >/dev/null 2>&1 || { apt_install python3-venv && "$python" -m venv --clear .venv; } ||
      die "$python cannot make a virtual environment; install its venv module (python3-venv)"
  fi
}

pip_install() { .venv/bin/python -m pip install -q --disable-pip-version-check --no-input --no-deps "$@"; }

install_packages() {
  local extra=() host
  host=$(sed -E 's|^[a-z]+://([^/:]+).*|\1|' <<<"$TORCH_CPU_INDEX")
  if ! command -v nvidia-smi >/dev/null && getent hosts "$host" >/dev/null 2>&1; then
    extra=(--extra-index-url "$TORCH_CPU_INDEX")
  fi
  say "installing $(grep -c == constraints.txt) pinned packages (two to four minutes)"
  pip_install "${extra[@]}" -r constraints.txt
  .venv/bin/python -c 'import torch' ||
    die "torch does not load: its CUDA libraries are missing; set BURNISH_TORCH_INDEX to an index with CPU wheels"
}

# A stamp names what it was made from; the folder is in it because a moved .venv keeps paths to the old place.
stamp_of() { { pwd; cat "$@"; } | sha256sum | cut -c1-32; }
fresh() { [ -x .venv/bin/python ] && [ "$(cat ".venv/$1.stamp" 2>/dev/null)" = "$2" ]; }

packages=$(stamp_of constraints.txt .ci/setup.sh)
project=$(stamp_of pyproject.toml constraints.txt)
# before the engine's part, which runs beside pip: both may need apt, and apt takes one caller at a time
fresh packages "$packages" || make_venv

bash envs/sandbox/setup_engine.sh &
engine=$!

if ! fresh packages "$packages"; then
  install_packages
  echo "$packages" >.venv/packages.stamp
  rm -f .venv/project.stamp
fi
if ! fresh project "$project"; then
  pip_install --no-build-isolation -e .
  echo "$project" >.venv/project.stamp
fi

# pyright does not run import hooks: this ignored link shows it the `burnish` namespace
mkdir -p build/typing && ln -sfn ../.. build/typing/burnish

wait "$engine"
say "ready: .venv/bin/burnish --help"
