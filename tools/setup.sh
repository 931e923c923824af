#!/usr/bin/env bash
# tools/setup.sh [cpu|gpu]: make .venv hold a lock of requirements/, with this package installed editable, and see to the
# system packages. Without an argument it keeps the kind that .venv has; a new .venv is for CPU.
# Safe to run twice, and after an interruption: the first word of the stamp says what .venv is for, and the rest, which
# is written last, that all of it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
pythons=(3.12 3.13)
cpu_index=https://download.pytorch.org/whl/cpu
stamp=.venv/.installed
found=$(cut -d' ' -f1 "$stamp" 2>/dev/null || true) # cpu, gpu, gpu-without-te, or packed (tools/unpack_environment.py)
wanted=${1:-}
kind=${wanted:-${found:-cpu}}
[ "$kind ${TE:-1}" != "gpu 0" ] || kind=gpu-without-te

say() { printf 'or1 setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
is_supported() { [[ " ${pythons[*]} " == *" $1 "* ]]; }

find_python() {
  local version candidate
  if [ -n "${PYTHON:-}" ]; then
    version=$(version_of "$PYTHON") || die "PYTHON=$PYTHON does not start"
    is_supported "$version" || die "PYTHON=$PYTHON is Python $version; ${pythons[*]} are what the tests run on"
    command -v "$PYTHON"
    return
  fi
  installed_python && return
  say "no Python ${pythons[*]} is installed; asking uv for one"
  if uv_installs_python && installed_python; then
    return
  fi
  die "Python 3.12 or 3.13 is needed and none was found: looked for ${pythons[*]/#/python} and python3 on PATH, in" \
    "$(python_folders | paste -sd ' '), and asked uv for one (its message is above). Install one (Ubuntu 24.04: apt install" \
    "python3.12-venv; Debian 13: apt install python3.13-venv; or pyenv install 3.12), or name it: make PYTHON=/path/to/python3.12 ..."
}

# Where pyenv and uv keep their Pythons. pyenv's command on PATH fails while another version is the global one.
python_folders() {
  printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}/versions" \
    "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"
}

installed_python() {
  local version candidate
  for version in "${pythons[@]}"; do
    while read -r candidate; do
      if [ "$(version_of "$candidate")" = "$version" ]; then
        echo "$candidate"
        return
      fi
    done < <(type -aP "python$version" python3; python_folders | sed "s|$|/*$version*/bin/python3|" | xargs -I% bash -c 'compgen -G %')
  done
  return 1
}

uv_installs_python() {
  local uv folder any
  folder=$(mktemp -d)
  if ! uv=$(command -v uv); then
    for any in $(type -aP python3); do
      # Debian's Python may lack venv, or pip.
      { "$any" -m venv "$folder" && "$folder/bin/python" -m pip install -qq uv; } >/dev/null 2>&1 && break
      "$any" -m pip install -qq --target "$folder" uv >/dev/null 2>&1 && break
    done
    uv=$folder/bin/uv
  fi
  if [ -x "$uv" ]; then
    "$uv" python install "${pythons[0]}" >&2
  else
    say "uv could not be installed: no python3 on PATH has pip or venv, or PyPI does not answer"
  fi
  rm -rf "$folder"
}

# Say why .venv cannot be used as it is; nothing if it can, or if there is none.
problem_of_venv() {
  local version
  [ -e .venv ] || return 0
  if ! version=$(version_of .venv/bin/python); then
    echo "its Python does not start"
  elif ! is_supported "$version"; then
    echo "it has Python $version, and ${pythons[*]} are what the tests run on"
  elif [ -n "${PYTHON:-}" ] && [ "$version" != "$(version_of "$PYTHON")" ]; then
    echo "it has Python $version, and PYTHON=$PYTHON has $(version_of "$PYTHON")"
  elif [ -z "$found" ]; then
    echo "this script did not finish making it"
  elif [ "${found%%-*}" != "${kind%%-*}" ]; then
    echo "it is for $found, and $kind is wanted"
  fi
}

make_venv() {
  local python=$1 version
  version=$(version_of "$python")
  say "creating .venv with $("$python" --version) ($python)"
  rm -rf .venv
  if ! "$python" -m venv .venv >/dev/null 2>&1; then
    apt_install "python$version-venv"
    "$python" -m venv .venv >&2 || die "$python cannot make a virtual environment (its message is above);" \
      "on Debian and Ubuntu: apt install python$version-venv"
  fi
  printf '%s' "$kind" >"$stamp"
}

install_python_packages() {
  # A venv keeps absolute paths, so the folder belongs to the key as much as the locks do.
  local key each
  key="$kind $(cat requirements/*.lock pyproject.toml | sha256sum | cut -d' ' -f1) $PWD"
  if [ "$(cat "$stamp")" = "$key" ]; then
    return
  fi
  printf '%s' "$kind" >"$stamp"
  # pip writes INSTALLER last. Without it the next pip would take a package that was cut short for a whole one.
  for each in .venv/lib/python3*/site-packages/*.dist-info; do
    [ -f "$each/INSTALLER" ] || rm -rf "$each"
  done
  export TMPDIR="$PWD/.venv/tmp" # what an interrupted pip left there goes away here
  rm -rf "$TMPDIR" && mkdir "$TMPDIR"
  "install_${kind%%-*}_lock"
  [ "$kind" != gpu ] || install_transformer_engine
  pip_install --no-deps --no-build-isolation -e .
  rm -rf "$TMPDIR"
  printf '%s' "$key" >"$stamp"
  say "done: .venv is ready, $(du -sh .venv | cut -f1)"
}

# A CPU build of torch is a third of PyPI's, which brings CUDA; both run the tests.
install_cpu_lock() {
  local lock=requirements/cpu.lock version
  version=$(sed -n 's/^torch==//p' "$lock")
  if [ -n "$(installed_torch)" ]; then
    say "installing what is missing of $lock"
  elif has_cpu_torch "$version"; then
    say "installing $lock, with the CPU build of torch that pip finds: .venv takes 2.1 GB"
    pip_install --no-deps "torch==$version+cpu"
  elif has_cpu_torch "$version" --index-url "$cpu_index"; then
    say "installing $lock, with torch from PyTorch's CPU index: .venv takes 2.1 GB"
    pip_install --no-deps "torch==$version+cpu" --index-url "$cpu_index"
  else
    say "installing $lock, with PyPI's torch, which brings CUDA and runs without a GPU: .venv takes 6.5 GB" \
      "(pip finds no CPU build, nor does $cpu_index offer one)"
  fi
  if [[ $(installed_torch) == *+cpu ]]; then # it loads none of NVIDIA's libraries
    install_pins "$(grep -vE '^(cuda|nvidia)-' "$lock")"
  else
    install_pins "$(cat "$lock")"
  fi
}

installed_torch() { .venv/bin/python -m pip show torch 2>/dev/null | sed -n 's/^Version: //p' || true; }

has_cpu_torch() {
  local version=$1
  shift
  timeout 20 .venv/bin/python -m pip index versions torch --timeout 5 --retries 0 "$@" 2>/dev/null | grep -qF "$version+cpu"
}

install_gpu_lock() {
  say "installing requirements/gpu.lock: .venv takes 9 GB"
  install_pins "$(cat requirements/gpu.lock)"
}

# Its PyTorch part is compiled against that torch and the headers that came with it.
install_transformer_engine() {
  local nvidia
  nvidia=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
  say "building Transformer Engine (minutes; MAX_JOBS says how many files at once)"
  # Its version would have this repository's commit in it, and pip refuses one that the lock does not name.
  NVTE_NO_LOCAL_VERSION=1 \
  CUDA_HOME=$nvidia/cu13 CPATH=$nvidia/cudnn/include:$nvidia/nccl/include NVTE_PYTORCH_FORCE_BUILD=TRUE \
    pip_install --no-deps --no-build-isolation -r requirements/transformer_engine.lock
}

# Some at a time, as pip installs nothing before it has downloaded all that it was asked for: an interruption loses less.
install_pins() {
  local pins first
  mapfile -t pins < <(grep '^[^#]' <<<"$1")
  for ((first = 0; first < ${#pins[@]}; first += 20)); do
    pip_install --no-deps "${pins[@]:first:20}"
  done
}

pip_install() {
  .venv/bin/python -m pip install -qq --disable-pip-version-check --no-warn-script-location "$@" ||
    die "pip install $* failed (its message is above; $(df -h --output=avail . | tail -1 | tr -d ' ') are free here)." \
      "The same command goes on from what is installed."
}

# Before anything is downloaded. The lock says for which CUDA it is.
check_gpu_machine() {
  local python=$1 version headers consequence status=0
  PYTHONPATH=$PWD "$python" - "$(sed -n 's/^cuda-toolkit==//p' requirements/gpu.lock)" <<'END' || status=$?
import sys
from or1_megatron.runtime.nvidia_driver import driver_cuda, driver_problem

major, minor = map(int, sys.argv[1].split(".")[:2])
if problem := driver_problem((major, minor)):
    sys.exit(f"or1 setup: {problem}")
sys.exit(0 if driver_cuda() else 3)
END
  case $status in
    0) ;;
    3)
      driver=none
      say "warning: no NVIDIA driver here; the environment is made all the same, for machines that have one"
      ;;
    *) exit 1 ;;
  esac
  if [ "$kind" = gpu-without-te ]; then
    say "without Transformer Engine (TE=0): training uses this project's own layers, which are slower"
    return
  fi
  version=$(version_of "$python")
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  consequence="Transformer Engine cannot be compiled; \`make gpu TE=0\` leaves it out."
  need "a C++ compiler" "command -v '${CXX:-c++}'" g++ "$consequence" || exit 1
  need "Python's header Python.h" "test -f '$headers/Python.h'" "python$version-dev" "$consequence" || exit 1
}

# need NAME PRESENT-TEST PACKAGE CONSEQUENCE: install a system package where we may, else say what will not work.
need() {
  local name=$1 present=$2 package=$3 consequence=$4
  if eval "$present" >/dev/null 2>&1; then
    return
  fi
  apt_install "$package"
  if ! eval "$present" >/dev/null 2>&1; then
    say "$name is missing: install it (Debian, Ubuntu: apt install $package). Without it $consequence"
    return 1
  fi
}

apt_install() {
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing $1"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get install -y -qq "$1" || { apt-get update -qq && apt-get install -y -qq "$1"; }; } >/dev/null 2>&1 || true
  fi
}

have_library() {
  .venv/bin/python -c "import ctypes, sys; ctypes.CDLL(sys.argv[1])" "$1"
}

main() {
  local problem python=.venv/bin/python
  [ "$found" != packed ] || return 0
  problem=$(problem_of_venv)
  if [ ! -e .venv ] || [ -n "$problem" ]; then
    python=$(find_python)
  fi
  [ "$wanted" != gpu ] || check_gpu_machine "$python"
  if [ "$python" != .venv/bin/python ]; then
    [ -z "$problem" ] || say "making .venv anew: $problem"
    rm -f "$stamp" # first: what is left of an interrupted removal is not whole
    make_venv "$python"
  fi
  install_python_packages
  need bubblewrap "command -v bwrap" bubblewrap \
    "code verification is not possible (untrusted programs would run unconfined); math training works." || true
  [ "$kind" != cpu ] || need libnuma "have_library libnuma.so.1" libnuma1 \
    "vLLM's CPU engine does not load, so nothing can be trained here." || true
}

main
if [ "$wanted" = gpu ]; then
  .venv/bin/or1 doctor || [ "${driver:-}" = none ] # what it misses without a driver is this machine's, not the environment's
fi
