# shellcheck shell=bash
#
# What smp needs and how it is installed; `./dev` includes this.
#
# Dependencies live outside the clone, one directory per name and version, so
# that clones share them and `./dev clean` never costs a download. A directory
# is filled under a temporary name and renamed when it is complete: nothing
# half-made is ever taken for a good one. What is loaded goes on while CAF is
# compiled.
#
# A failure prints one line: what failed, which log to read, what to do.

# -- versions ------------------------------------------------------------------

torch_version=2.11.0
ucx_version=1.22.0
caf_version=0.18.7
catch2_version=3.7.1

torch_prefix=$deps/torch-$torch_version
ucx_prefix=$deps/ucx-$ucx_version
with_cuda=.with_cuda # a file in there if it has the libraries of CUDA
cuda= # set by find_cuda
caf_prefix=$deps/caf-$caf_version
caf_tsan_prefix=$deps/caf-$caf_version-tsan
catch2_prefix=$deps/catch2-$catch2_version

# Raise this when an installer below changes what it puts into a directory:
# directories made by an older recipe are then made again.
recipe=2

# Wheels are chosen for this Python, whichever one runs pip: C++ only wants the
# headers and libraries inside, the same for all of them.
wheel_tags=(--only-binary=:all: --implementation cp --python-version 3.11
  --abi cp311 --abi abi3 --abi none --platform manylinux2014_x86_64)
for glibc in {28..17}; do
  wheel_tags+=(--platform "manylinux_2_${glibc}_x86_64")
done
torch_wheels=("torch==$torch_version" nvidia-cuda-crt==13.0.88
  nvidia-cuda-cupti==13.0.85 nvidia-cuda-runtime==13.0.96)
# What LibTorch loads beside them on a machine with a GPU.
cuda_wheels=(nvidia-cublas==13.1.0.3 nvidia-cuda-nvrtc==13.0.88
  nvidia-cudnn-cu13==9.19.0.56 nvidia-cufft==12.0.0.61
  nvidia-cufile==1.15.1.6 nvidia-curand==10.4.0.35 nvidia-cusolver==12.0.4.66
  nvidia-cusparse==12.6.3.3 nvidia-cusparselt-cu13==0.8.0
  nvidia-nccl-cu13==2.28.9 nvidia-nvjitlink==13.0.88
  nvidia-nvshmem-cu13==3.4.5)
ucx_wheels=("libucx-cu13==$ucx_version")

# A Python environment of its own, for the package of python/ and its tests, for
# `./dev zoo`, and for benchmarks that compare with PyTorch.
python_packages=$root/python/requirements.txt
python_prefix=$deps/python-$(sha256sum <"$python_packages" | cut -c1-12)

# The next major version of transformers, for tests: goes before those in
# PYTHONPATH.
next_packages=$root/python/next_transformers.txt
next_prefix=$deps/next-transformers-$(sha256sum <"$next_packages" | cut -c1-12)

# Paths below a Debian mirror's root, and what must be found there.
caf_source=pool/main/a/actor-framework/actor-framework_$caf_version.orig.tar.gz
caf_sha256=d5c3abe8fd67a729aab1baeece10367637d903ba335f4c79378bcadfbcd34552
catch2_deb=pool/main/c/catch2/libcatch2-dev_$catch2_version-0.4~bpo12+1_amd64.deb
catch2_sha256=1dbb62ed9f177e1cf51e573903cc553241764bd3b6655f5a98889ad361d008dc

build_packages=(g++ cmake ninja-build ccache mold libboost-dev libssl-dev
  libtomlplusplus-dev libcli11-dev nlohmann-json3-dev libncurses-dev
  libprotozero-dev)
lint_packages=(clang-format clang-tidy)
test_packages=(openmpi-bin tmux iproute2 iptables "${lint_packages[@]}")
fuzz_packages=(clang)

# -- messages ------------------------------------------------------------------

say() { printf 'dev: %s\n' "$*" >&2; }

# die WHAT LOG ADVICE: the one line that a failure prints. An empty LOG is left
# out.
die() {
  local what=$1 log=$2 advice=$3
  printf 'dev: %s%s; %s\n' "$what" "${log:+ (log: $log)}" "$advice" >&2
  exit 1
}

# Prints the advice for a failed step: what the end of its log says if we know
# the words, else the step's own advice. A step that loads something sets
# `loading`.
advice_for() {
  local log=$1 advice=$2 end
  end=$(tail -n 40 "$log")
  if grep -q -i -E 'no space left|disk full|disk quota' <<<"$end"; then
    echo "the disk is full: free some space (or set SMP_DEPS_DIR to a larger disk) and run again"
  elif grep -q -E 'Killed signal|annot allocate memory' <<<"$end"; then
    echo "not enough memory: run again with SMP_JOBS=1"
  elif [[ -n ${loading:-} ]] && grep -q -i -E 'resol|connect|timed out|unreachable|proxy' <<<"$end"; then
    echo "the network did not answer: check the connection and the proxy and mirror settings of apt and pip, and run again"
  else
    echo "$advice"
  fi
}

new_log() {
  { mkdir -p "${1%/*}" && : >"$1"; } 2>/dev/null ||
    die "cannot write $1" "" "free some space there or make it writable, and run again"
}

# step WHAT LOG ADVICE COMMAND...: runs COMMAND with its output appended to LOG.
step() {
  local what=$1 log=$2 advice=$3
  shift 3
  printf '\n== %s: %s\n' "$(date '+%F %T')" "$*" >>"$log" || true
  "$@" >>"$log" 2>&1 </dev/null ||
    die "$what failed" "$log" "$(advice_for "$log" "$advice")"
}

# -- the machine ---------------------------------------------------------------

require_supported_system() {
  [[ ${SMP_ANY_SYSTEM:-} == 1 ]] && return
  local id="" version_id="" machine
  machine=$(uname -m)
  [[ $machine == x86_64 ]] ||
    die "unsupported processor $machine" "" "smp is built for x86-64 (SMP_ANY_SYSTEM=1 tries anyway)"
  if [[ -r /etc/os-release ]]; then
    id=$(. /etc/os-release && echo "${ID:-}")
    version_id=$(. /etc/os-release && echo "${VERSION_ID:-}")
  fi
  [[ $id == debian && $version_id == 12 ]] ||
    die "unsupported system ${id:-unknown} $version_id" "" "smp is set up for Debian 12 (SMP_ANY_SYSTEM=1 tries anyway)"
}

# Prints how much to do at once: a file that includes Torch takes 2.5 GB.
jobs() {
  local processors by_memory
  processors=$(nproc)
  by_memory=$(awk '/^MemAvailable/ { print int($2 / 2500000) }' /proc/meminfo)
  ((by_memory >= 1)) || by_memory=1
  echo "${SMP_JOBS:-$((by_memory < processors ? by_memory : processors))}"
}

make_deps_dir() {
  if ! mkdir -p "$deps/logs" 2>/dev/null || [[ ! -w $deps ]]; then
    die "cannot write to $deps" "" "make it writable or set SMP_DEPS_DIR to another place"
  fi
}

missing_packages() {
  local package status
  for package in "$@"; do
    status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) || true
    [[ $status == installed ]] || echo "$package"
  done
}

# Installs those of the named Debian packages that are missing.
system_packages() {
  local -a missing as_root=()
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    sudo -n true 2>/dev/null ||
      die "Debian packages are missing and this is not root" "" "run as root: apt-get install ${missing[*]}"
    as_root=(sudo -n)
  fi
  make_deps_dir
  local log=$deps/logs/apt.log loading=1
  new_log "$log"
  say "installing Debian packages: ${missing[*]} ..."
  local -a env=(env DEBIAN_FRONTEND=noninteractive)
  # An apt that was killed half-way leaves dpkg to be put in order first.
  step "dpkg --configure -a" "$log" "put dpkg in order and run again" \
    "${as_root[@]}" "${env[@]}" dpkg --configure -a
  # A stale list of one third-party repository must not stop us: whether the
  # update was good enough is for the install to say.
  "${as_root[@]}" apt-get update >>"$log" 2>&1 </dev/null || true
  step "apt-get install ${missing[*]}" "$log" "read the log's last lines" \
    "${as_root[@]}" "${env[@]}" apt-get install -y -q --no-install-recommends \
    -o DPkg::Lock::Timeout=600 "${missing[@]}"
}

# Prints the first Debian mirror in apt's configuration, as far as apt has the
# mirror's package lists.
known_mirror() {
  # shellcheck disable=SC2016 # apt fills these in
  apt-get "$@" indextargets --format '$(ORIGIN) $(REPO_URI)' 2>/dev/null |
    awk '$1 == "Debian" && $2 ~ /^https?:/ && $2 !~ /security/ { print $2; exit }' ||
    true
}

# debian_mirror SCRATCH: prints the root of the Debian mirror that this machine's
# apt uses.
debian_mirror() {
  local mirror lists=$1/apt-lists
  mirror=$(known_mirror)
  if [[ -z $mirror ]]; then
    # A fresh container has no package lists: fetch them aside.
    local -a aside=(-o "Dir::State::lists=$lists" -o APT::Sandbox::User=)
    mkdir -p "$lists/partial"
    apt-get "${aside[@]}" update >/dev/null 2>&1 || true
    mirror=$(known_mirror "${aside[@]}")
    rm -rf "$lists"
  fi
  echo "${mirror%/}"
}

# Whether this machine can train on GPUs with the CUDA that LibTorch was made
# for; runtime/device/cuda/probe.cpp asks the same when it trains. Sets `cuda`.
find_cuda() {
  cuda=${SMP_CUDA:-}
  case $cuda in
  0) cuda= ;;
  1) ;;
  "")
    if timeout -k 1 30 python3 - 2>/dev/null <<'END'; then cuda=1; fi
import ctypes, sys
driver = ctypes.CDLL("libcuda.so.1")
version, devices = ctypes.c_int(), ctypes.c_int()
failed = (driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(version))
          or driver.cuDeviceGetCount(ctypes.byref(devices)))
sys.exit(failed != 0 or version.value < 13000 or devices.value == 0)
END
    ;;
  *) die "SMP_CUDA=$cuda" "" "write 1 to load CUDA's libraries, 0 not to, or unset it" ;;
  esac
}

# -- what the dependency directories hold --------------------------------------

# Each installer fills the directory named by its first argument and logs to
# the second. Several run at a time, so none of them may touch anything else.

# Prints a Python that has pip.
python_with_pip() {
  local python
  for python in python3 /usr/bin/python3; do
    if "$python" -m pip --version >/dev/null 2>&1; then
      echo "$python"
      return
    fi
  done
}

# Prints the Debian packages that bring one, if there is none.
packages_for_pip() {
  echo ca-certificates
  [[ -n $(python_with_pip) ]] || printf '%s\n' python3 python3-pip
}

# fetch_wheels LOG TO WHEEL...
fetch_wheels() {
  local log=$1 to=$2 python loading=1
  shift 2
  python=$(python_with_pip)
  mkdir -p "$to/tmp"
  step "download of $*" "$log" "check pip's index settings and run again" \
    env TMPDIR="$to/tmp" "$python" -m pip --disable-pip-version-check download \
    --no-deps --no-cache-dir --progress-bar off "${wheel_tags[@]}" -d "$to" "$@"
}

# fetch_from_mirror LOG PATH SHA256 FILE
fetch_from_mirror() {
  local log=$1 path=$2 sha256=$3 file=$4 mirror loading=1
  mirror=$(debian_mirror "${file%/*}")
  [[ -n $mirror ]] ||
    die "no Debian mirror found in apt's configuration" "" "check apt's sources and the network ('apt-get update' must work) and run again"
  step "download of ${path##*/}" "$log" "check that apt's mirror has it, and run again" \
    /usr/lib/apt/apt-helper -o APT::Sandbox::User= download-file \
    "$mirror/$path" "$file" "SHA256:$sha256"
}

# Of LibTorch what a C++ program uses: headers, libc10, libtorch_cpu, the
# libraries these two need, (in the headers) fmt, and the headers of the CUDA
# runtime. Where there is a GPU also what its libtorch_cuda needs, in the places
# where the wheels have it: libraries find each other by those.
install_torch() {
  local to=$1 log=$2 wheel
  local -a libraries=(torch/lib/lib{c10,torch_cpu}.so)
  [[ -z $cuda ]] || libraries+=(
    torch/lib/lib{c10_cuda,torch_cuda,torch_cuda_linalg,torch_nvshmem,caffe2_nvrtc}.so)
  fetch_wheels "$log" "$to/wheels" "${torch_wheels[@]}"
  wheel=$(echo "$to"/wheels/torch-*.whl)
  step "unpacking LibTorch" "$log" "run again" unzip -q "$wheel" \
    'torch/include/*' torch/lib/libgomp.so.1 \
    "${libraries[@]}" -d "$to"
  rm -f "$wheel"
  for wheel in "$to"/wheels/nvidia*.whl; do
    local -a parts=('nvidia/cu13/include/*')
    [[ $wheel == *_crt-* ]] || parts+=('nvidia/cu13/lib/libcu[pd]*.so.13')
    step "unpacking ${wheel##*/}" "$log" "run again" \
      unzip -q -o "$wheel" "${parts[@]}" -d "$to"
  done
  rm -rf "$to/wheels"
  [[ -z $cuda ]] || install_cuda "$to" "$log"
}

# One after the other, so that each is on the disk twice only while it is
# unpacked.
install_cuda() {
  local to=$1 log=$2 wheel
  for wheel in "${cuda_wheels[@]}"; do
    fetch_wheels "$log" "$to/wheels" "$wheel"
    step "unpacking $wheel" "$log" "run again" \
      unzip -q -o "$to"/wheels/*.whl 'nvidia/*/lib/*.so*' -d "$to"
    rm -rf "$to/wheels"
  done
  : >"$to/$with_cuda"
}

install_ucx() {
  local to=$1 log=$2
  fetch_wheels "$log" "$to/wheels" "${ucx_wheels[@]}"
  step "unpacking UCX" "$log" "run again" unzip -q "$to"/wheels/*.whl -d "$to"
  rm -rf "$to/wheels"
}

# build_caf TO LOG CMAKE_OPTION...
build_caf() {
  local to=$1 log=$2 work=$1/work
  shift 2
  mkdir -p "$work/source"
  fetch_from_mirror "$log" "$caf_source" "$caf_sha256" "$work/caf.tar.gz"
  step "unpacking CAF" "$log" "run again" \
    tar -xzf "$work/caf.tar.gz" -C "$work/source" --strip-components=1
  # GCC 13 and later want what this header uses to be included.
  sed -i '0,/#include/s//#include <cstdint>\n#include/' \
    "$work/source/libcaf_core/caf/detail/ripemd_160.hpp"
  step "configuring CAF" "$log" "read the log's last lines" \
    cmake -G Ninja -S "$work/source" -B "$work/build" \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$to" \
    -DCMAKE_INSTALL_LIBDIR=lib "-DCMAKE_INSTALL_RPATH=\$ORIGIN" \
    -DCMAKE_CXX_STANDARD=20 -DCAF_ENABLE_EXAMPLES=OFF \
    -DCAF_ENABLE_TESTING=OFF -DCAF_ENABLE_TOOLS=OFF \
    -DCAF_ENABLE_ACTOR_PROFILER=ON -DCAF_LOG_LEVEL=WARNING "$@"
  step "building CAF" "$log" "read the log's last lines" \
    cmake --build "$work/build" -j "$(jobs)"
  step "installing CAF" "$log" "read the log's last lines" \
    cmake --install "$work/build"
  rm -rf "$work"
}

install_caf() { build_caf "$1" "$2" -DCAF_ENABLE_OPENSSL_MODULE=ON; }

# A data race can only be seen in code that was compiled for it.
install_caf_tsan() {
  build_caf "$1" "$2" -DCAF_ENABLE_OPENSSL_MODULE=ON \
    -DCMAKE_CXX_FLAGS="-fsanitize=thread -g1" \
    -DCMAKE_EXE_LINKER_FLAGS=-fsanitize=thread \
    -DCMAKE_SHARED_LINKER_FLAGS=-fsanitize=thread
}

install_catch2() {
  local to=$1 log=$2
  fetch_from_mirror "$log" "$catch2_deb" "$catch2_sha256" "$to/catch2.deb"
  step "unpacking Catch2" "$log" "run again" dpkg -x "$to/catch2.deb" "$to"
  rm -f "$to/catch2.deb"
}

# install_packages TO LOG PACKAGES ARG...: `pip ARG...` of a file of python/. All
# packages are pinned there, so pip has nothing to resolve.
install_packages() {
  local to=$1 log=$2 packages=$3 loading=1
  shift 3
  mkdir -p "$to/tmp"
  step "installing python/${packages##*/}" "$log" \
    "check pip's index settings and that 'python3 --version' says 3.11 or later, and run again" \
    env TMPDIR="$to/tmp" "$(python_with_pip)" -m pip \
    --disable-pip-version-check "$@" --no-deps --no-cache-dir \
    --only-binary=:all: --progress-bar off -r "$packages"
  rm -rf "$to/tmp"
}

install_python() {
  local to=$1 log=$2
  step "making a Python environment" "$log" "read the log's last lines" \
    "$(python_with_pip)" -m venv --without-pip "$to"
  install_packages "$to" "$log" "$python_packages" \
    --python "$to/bin/python" install
}

install_next_transformers() {
  install_packages "$1" "$2" "$next_packages" install --target "$1/packages"
}

# Prints the Debian packages that the environment and extensions for it need.
packages_for_python() {
  local python
  packages_for_pip
  python=$(python_with_pip)
  "${python:-/usr/bin/python3}" - 2>/dev/null <<'END' || echo python3-dev
import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
END
}

makes_python() { [[ -z ${SMP_PYTHON:-} && $preset == release ]]; }

# begin_python: beside what else is missing.
begin_python() {
  makes_python || return 0
  # shellcheck disable=SC2046 # one word each
  complete "$python_prefix" || system_packages $(packages_for_python)
  begin "$python_prefix" \
    "Python with PyTorch, transformers, torchvision and timm (2.5 GB download, some minutes on a slow line)" \
    7000 install_python
}

# begin_next_transformers: beside the environment, for tests.
begin_next_transformers() {
  makes_python || return 0
  begin "$next_prefix" "the next major version of transformers (30 MB download)" \
    250 install_next_transformers
  export SMP_NEXT_TRANSFORMERS=$next_prefix/packages
}

# -- installing them -----------------------------------------------------------

complete() {
  [[ $(cat "$1/.complete" 2>/dev/null) == "$recipe" ]] || return
  [[ $1 != "$torch_prefix" || -z $cuda || -e $1/$with_cuda ]]
}

# Other runs wait here. The lock is inherited by what we start, so that nobody
# clears away a directory while an orphan of a killed run still writes into it.
lock_deps() {
  [[ -n ${lock_held:-} ]] && return
  exec 9>"$deps/.lock"
  flock -n 9 || {
    say "another ./dev is installing dependencies, waiting for it ..."
    flock 9
  }
  lock_held=1
  clear_stages
  trap clear_stages EXIT
}

# Whoever holds the lock may clear away what is half-made, by us or by a run
# that was killed. Installers of ours that still run end first.
clear_stages() {
  local installer
  [[ -n ${lock_held:-} ]] || return 0
  for installer in "${installers[@]}"; do
    kill -TERM -- "-$installer" 2>/dev/null || true
  done
  wait 2>/dev/null
  rm -rf "$deps"/.stage-*
}

unlock_deps() {
  [[ -n ${lock_held:-} ]] || return 0
  clear_stages
  exec 9>&-
  lock_held=
}

# require_space WHAT NEEDED_MB: also for what the running installers will need.
require_space() {
  local what=$1 needed_mb=$(($2 + promised_mb)) free_mb
  free_mb=$(df -Pm "$deps" | awk 'NR == 2 { print $4 }')
  ((free_mb >= needed_mb)) ||
    die "no room for $what in $deps" "" "it needs $needed_mb MB and $free_mb MB are free: free some space, or set SMP_DEPS_DIR to a larger disk, and run again"
}

installers=()
errors=()
promised_mb=0

# begin PREFIX WHAT NEEDED_MB INSTALLER: what is missing is installed in the
# background.
begin() {
  local prefix=$1 what=$2 needed_mb=$3
  complete "$prefix" && return
  make_deps_dir
  lock_deps
  complete "$prefix" && return
  require_space "$what" "$needed_mb"
  promised_mb=$((promised_mb + needed_mb))
  say "installing $what ..."
  # With job control on, each gets a process group of its own, to be ended with
  # all that it started.
  set -m
  install_into "$prefix" "$what" "$4" </dev/null 2>"$deps/.stage-error-${prefix##*/}" &
  set +m
  installers+=($!)
  errors+=("$deps/.stage-error-${prefix##*/}")
}

install_into() {
  local prefix=$1 what=$2 installer=$3
  local stage=$deps/.stage-${prefix##*/} log=$deps/logs/${prefix##*/}.log
  trap - EXIT INT
  mkdir -p "$stage"
  new_log "$log"
  "$installer" "$stage" "$log"
  # shellcheck disable=SC2016 # the inner shell fills these in
  step "marking $what complete" "$log" "run again" \
    bash -c 'echo "$1" >"$2/.complete" && sync -f "$2"' - "$recipe" "$stage"
  rm -rf "$prefix"
  mv -T "$stage" "$prefix"
}

# Waits for all that was begun. If one fails the others go on, so that what they
# load need not be loaded again, and the line of the first is printed.
finish() {
  local i failed=
  for i in "${!installers[@]}"; do
    if ! wait "${installers[i]}" && [[ -z $failed ]]; then
      failed=${errors[i]}
    fi
  done
  installers=()
  errors=()
  promised_mb=0
  if [[ -n $failed ]]; then
    cat "$failed" >&2
    exit 1
  fi
  unlock_deps
}

# A dependency that the environment names is taken as it is.
use_or_begin() {
  local variable=$1 inside=$2
  shift 2
  [[ -n ${!variable:-} ]] || begin "$@"
  export "$variable=${!variable:-$1$inside}"
}

# Prints the Debian packages that the missing dependencies need.
packages_for_deps() {
  if { [[ -z ${SMP_UCX_DIR:-} ]] && ! complete "$ucx_prefix"; } ||
    { [[ -z ${SMP_TORCH_DIR:-} ]] && ! complete "$torch_prefix"; }; then
    echo unzip
    packages_for_pip
  fi
}

install_deps() {
  require_supported_system
  # shellcheck disable=SC2046 # one word each
  system_packages "${build_packages[@]}" $(packages_for_deps)
  # The longest download first, and CAF, which is compiled meanwhile.
  find_cuda
  local torch="LibTorch $torch_version (545 MB download, some minutes on a slow line)"
  local torch_mb=1300
  if [[ -n $cuda ]]; then
    torch="LibTorch $torch_version with CUDA for the GPU of this machine (2.5 GB download, 3.6 GB on disk, many minutes on a slow line; with SMP_CUDA=0 it would be 545 MB and train on the CPU)"
    torch_mb=4800
  fi
  use_or_begin SMP_TORCH_DIR /torch "$torch_prefix" "$torch" "$torch_mb" \
    install_torch
  if [[ $preset == tsan ]]; then
    use_or_begin SMP_CAF_DIR "" "$caf_tsan_prefix" \
      "CAF $caf_version with ThreadSanitizer (built from source, about 6 minutes)" \
      400 install_caf_tsan
  else
    use_or_begin SMP_CAF_DIR "" "$caf_prefix" \
      "CAF $caf_version (built from source, about 3 minutes)" 200 install_caf
  fi
  use_or_begin SMP_UCX_DIR /libucx "$ucx_prefix" \
    "UCX $ucx_version (45 MB download)" 300 install_ucx
  use_or_begin SMP_CATCH2_DIR /usr "$catch2_prefix" \
    "Catch2 $catch2_version" 20 install_catch2
  finish
}
