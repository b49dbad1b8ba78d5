# Sourced by ./deploy, ./test and ./bench: what each needs on a fresh machine, made once and then only compared.
# shellcheck shell=bash
set -euo pipefail

say() { printf '\n\033[1m%s\033[0m\n' "$*" >&2; }
die() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

# install_packages PACKAGE...: Debian packages that turned out to be missing
install_packages() {
  [ "$(id -u)" = 0 ] || die "please install the Debian package(s) $*, or run this as root"
  say "Installing $*"
  apt-get -qq update
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
}

# ensure_venv DIR LOCK...: a virtual environment that holds exactly what the locks say. Their hash lies inside, written
# last: an interrupted installation is done again, a finished one costs nothing.
ensure_venv() {
  local dir=$1 lock hash marker=$1/.locks-sha256
  shift
  command -v python3 >/dev/null || install_packages python3
  hash=$(cat "$@" | sha256sum | cut -d' ' -f1)
  [ "$(cat "$marker" 2>/dev/null)" = "$hash" ] && return
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "python3 is $(python3 -V 2>&1 | cut -d' ' -f2); the controller needs 3.11 or newer (Debian 12 has it)"
  python3 -c 'import ensurepip' 2>/dev/null || install_packages python3-venv
  say "Setting up $dir from $*"
  rm -rf "$dir"
  python3 -m venv "$dir"
  for lock in "$@"; do # --no-deps: a lock is complete, and what it leaves out on purpose is not pip's to add
    "$dir/bin/pip" install -qq --disable-pip-version-check --require-hashes --no-deps -r "$lock"
  done
  echo "$hash" >"$marker"
}
