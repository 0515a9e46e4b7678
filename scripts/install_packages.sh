#!/usr/bin/env bash
# Installs what moesaic needs on Debian 12 or Ubuntu 24.04, from the distribution only. Packages that
# are there are left alone; when all are, nothing is asked of apt or the network.
set -euo pipefail

packages=(
  build-essential cmake ninja-build ccache pkg-config       # build
  libopenblas-dev libopenmpi-dev openmpi-bin                # run
  libyaml-cpp-dev libcli11-dev libspdlog-dev libfmt-dev nlohmann-json3-dev libzstd-dev zlib1g-dev
  libpcre2-dev libutf8proc-dev                              # tokenizers
  liburing-dev                                              # file tier
  catch2 python3 python3-venv strace                        # tests
  perl perl-doc fortunes fortunes-min                       # text of the quickstart
)

if ! command -v dpkg-query >/dev/null; then
  echo "install_packages.sh: this is not Debian or Ubuntu. Install the equivalents of: ${packages[*]}" >&2
  exit 2
fi

is_installed() {
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

missing=()
for p in "${packages[@]}"; do
  is_installed "$p" || missing+=("$p")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "packages: all ${#packages[@]} are installed"
  exit 0
fi
echo "packages: missing ${missing[*]}"

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "install_packages.sh: needs root or sudo to install: ${missing[*]}" >&2
    exit 2
  fi
  as_root=(sudo)
fi
apt() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 "$@"
}

apt update -qq || echo "install_packages.sh: apt-get update failed; trying with the package lists at hand" >&2
unknown=()
for p in "${missing[@]}"; do
  [ -n "$(apt-cache madison "$p" 2>/dev/null)" ] || unknown+=("$p")
done
if [ ${#unknown[@]} -gt 0 ]; then
  echo "install_packages.sh: the configured package sources do not offer: ${unknown[*]}" >&2
  echo "  Debian: 'main' is enough. Ubuntu: enable 'universe' (add-apt-repository universe), then try again." >&2
  exit 4
fi
if ! apt install -y -qq --no-install-recommends "${missing[@]}"; then
  echo "install_packages.sh: apt-get could not install: ${missing[*]} (see its messages above)" >&2
  exit 4
fi
for p in "${missing[@]}"; do
  is_installed "$p" || { echo "install_packages.sh: $p is still missing after the installation" >&2; exit 4; }
done
