# Sourced by ./deploy, ./test and ./bench: what each needs on a fresh machine, made once and then only compared.
# shellcheck shell=bash
set -euo pipefail

say() { printf '\n\033[1m%s\033[0m\n' "$*" >&2; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

# ensure_packages PACKAGE...: installs the Debian packages that are missing; a service that one brings is not started.
ensure_packages() {
  local package missing=() policy=/usr/sbin/policy-rc.d own_policy='' status=0
  for package in "$@"; do
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || die "please install the Debian package(s) ${missing[*]}, or run this as root"
  say "Installing ${missing[*]}"
  if [ ! -e "$policy" ]; then
    own_policy=1
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  { apt-get -qq update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null; } || status=$?
  [ -z "$own_policy" ] || rm -f "$policy"
  [ "$status" = 0 ] || die "apt-get could not install ${missing[*]}: its words are above"
}

# ensure_venv DIR LOCK...: a virtual environment that holds exactly what the locks say. Their hash lies inside, written
# last: an interrupted installation is done again, a finished one costs nothing.
ensure_venv() {
  local dir=$1 lock hash marker=$1/.locks-sha256
  shift
  command -v python3 >/dev/null || ensure_packages python3
  hash=$(cat "$@" | sha256sum | cut -d' ' -f1)
  [ "$(cat "$marker" 2>/dev/null)" = "$hash" ] && return
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "python3 is $(python3 -V 2>&1 | cut -d' ' -f2); the controller needs 3.11 or newer (Debian 12 has it)"
  python3 -c 'import ensurepip' 2>/dev/null || ensure_packages python3-venv
  say "Setting up $dir from $*"
  rm -rf "$dir"
  hash -r # python3 may have been this environment's own
  python3 -m venv "$dir"
  for lock in "$@"; do # --no-deps: a lock is complete, and what it leaves out on purpose is not pip's to add
    "$dir/bin/pip" install -qq --disable-pip-version-check --require-hashes --no-deps -r "$lock"
  done
  echo "$hash" >"$marker"
}

# cpu_torch_source: the arguments, one a line, that make uv take torch's CPU build; PyPI's brings gigabytes of CUDA. A
# wheel in a folder that pip is told of (find-links) will do; without one it comes from PyTorch's own index.
cpu_torch_source() {
  local folder backend=(--torch-backend cpu)
  for folder in $(.venv-test/bin/pip config get global.find-links 2>/dev/null) ${PIP_FIND_LINKS:-}; do
    printf -- '--find-links\n%s\n' "$folder"
    compgen -G "${folder#file://}/torch-*.whl" >/dev/null && backend=()
  done
  [ ${#backend[@]} = 0 ] || printf '%s\n' "${backend[@]}"
}

# install_cpu_torch PYTHON: torch as workload/requirements.in names it, in its CPU build.
install_cpu_torch() {
  local source
  mapfile -t source < <(cpu_torch_source)
  .venv-test/bin/uv pip install --quiet --python "$1" "${source[@]}" "$(grep '^torch==' workload/requirements.in)"
}
