#!/usr/bin/env bash
# Make .venv hold what requirements/cpu.lock says, with this package installed editable, and see to the system packages.
# Safe to run twice, and after having been interrupted: the stamp is written last.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/cpu.lock
stamp=.venv/.installed

say() { printf 'or1 setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
  # 3.11 first: the lock is tested on it.
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "Python 3.11 or newer is needed and none was found (looked for python3.11, python3.12, python3.13, python3);" \
    "install one, or name it: make PYTHON=/path/to/python3.11 ..."
}

install_python_packages() {
  # A venv keeps absolute paths, so the folder belongs to the key as much as the lock does.
  local key python
  key="$(cat "$lock" pyproject.toml | sha256sum | cut -d' ' -f1) $PWD"
  if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
    return
  fi
  if ! .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python="$(find_python)"
    say "creating .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv || die "$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
  fi
  rm -f "$stamp"
  say "installing the $(grep -c '==' "$lock") pinned packages of $lock into .venv (2 GB; a minute or two, downloads aside)"
  pip_install --no-deps -r "$lock" || die "the installation failed (pip's message is above)." \
    "If it is torch that was not found: torch==2.13.0+cpu comes from PyTorch's CPU wheel index; point pip at it" \
    "with PIP_EXTRA_INDEX_URL and run the same command again."
  pip_install --no-deps --no-build-isolation -e . || die "installing this package failed (pip's message is above)"
  printf '%s' "$key" > "$stamp"
  say "done: .venv is ready"
}

pip_install() {
  .venv/bin/python -m pip install -qq --disable-pip-version-check --no-warn-script-location "$@"
}

# need NAME PRESENT-TEST PACKAGE CONSEQUENCE: install a system package where we may, else say what will not work.
need() {
  local name=$1 present=$2 package=$3 consequence=$4
  if eval "$present" >/dev/null 2>&1; then
    return
  fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing $package"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get install -y -qq "$package" || { apt-get update -qq && apt-get install -y -qq "$package"; }; } >/dev/null 2>&1 || true
    if eval "$present" >/dev/null 2>&1; then
      return
    fi
  fi
  say "$name is missing: install it (Debian, Ubuntu: apt install $package). Without it $consequence"
}

have_library() {
  .venv/bin/python -c "import ctypes, sys; ctypes.CDLL(sys.argv[1])" "$1"
}

install_python_packages
need bubblewrap "command -v bwrap" bubblewrap \
  "code verification is not possible (untrusted programs would run unconfined); math training works."
need libnuma "have_library libnuma.so.1" libnuma1 "vLLM's CPU engine does not load, so nothing can be trained here."
