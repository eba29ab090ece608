#!/usr/bin/env bash
# What the machine has to offer: nccl-tests in two builds, MPI's launcher, an MPS daemon of our own.
# Sourced by check-and-time.sh, after runs.sh.

readonly programs=(all_reduce_perf all_gather_perf broadcast_perf)

# --- nccl-tests ----------------------------------------------------------------------------------------------------

# The folder of a build of nccl-tests: where it lies, or built now. Arguments: folder, log, make's arguments.
# Prints the folder; what is wrong goes to standard error.
nccl_tests_in() {
  local folder=$1 build_log=$2 place
  shift 2
  for place in "$folder" "$folder/build"; do
    if [ -x "$place/${programs[0]}" ] && [ -x "$place/${programs[1]}" ] && [ -x "$place/${programs[2]}" ]; then
      (cd "$place" && pwd)
      return
    fi
  done
  [ -e "$folder/src/all_reduce.cu" ] || { echo "$folder has neither ${programs[*]} nor src/all_reduce.cu" >&2; return 1; }
  folder=$(cd "$folder" && pwd)
  # Code for the GPU of this machine alone: the whole list takes minutes.
  NVCC_GENCODE=${NVCC_GENCODE:--arch=native} \
    make -C "$folder/src" -j"$(nproc)" BUILDDIR="$folder/build" "$@" "${programs[@]/#/$folder/build/}" >"$build_log" 2>&1 </dev/null \
    || { echo "$folder does not build: $(grep -iE 'error|No such' "$build_log" | head -n 1 | cut -c 1-200)" >&2; return 1; }
  echo "$folder/build"
}

# The build with nccl-tests-patch/, for many ranks in one process. Sets nccl_tests once.
need_nccl_tests() {
  [ -z "${nccl_tests:-}" ] || return 0
  : "${NCCL_TESTS_DIR:=}"
  [ -n "$NCCL_TESTS_DIR" ] || { missing="NCCL_TESTS_DIR is not set"; return 1; }
  nccl_tests=$(NVCC_APPEND_FLAGS="-include $root/nccl-tests-patch/many-ranks-one-gpu.h" \
    nccl_tests_in "$NCCL_TESTS_DIR" "$out/build-nccl-tests.log" 2>"$out/missing.txt") || { missing=$(cat "$out/missing.txt"); return 1; }
}

# mpicc's include and library flags as nvcc takes them. The Makefile of nccl-tests wants libmpi.so: where MPI has another
# name for it, a link.
mpi_flags() {
  local word library_folders=() folder
  for word in $(mpicc -show 2>/dev/null); do
    case "$word" in
      -I*) printf '%s ' "$word" ;;
      -L*) printf '%s ' "$word"; library_folders+=("${word#-L}") ;;
      -Wl,*) printf -- '-Xlinker %s ' "${word#-Wl,}" ;;
    esac
  done
  for folder in "${library_folders[@]}" ${MPI_HOME:+"$MPI_HOME/lib"} /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib; do
    if [ -e "$folder/libmpi.so" ]; then printf -- '-L%s' "$folder"; return; fi
  done
  for folder in "${library_folders[@]}" /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib; do
    [ -e "$folder/libmpich.so" ] || continue
    mkdir -p "$out/mpi"
    ln -sfn "$folder/libmpich.so" "$out/mpi/libmpi.so"
    printf -- '-L%s' "$out/mpi"
    return
  done
}

# The unmodified build with MPI, one process a rank, and the launcher. Sets mpi_tests and launcher once.
need_mpi_tests() {
  need_launcher || return 1
  [ -z "${mpi_tests:-}" ] || return 0
  : "${NCCL_TESTS_MPI_DIR:=}"
  [ -n "$NCCL_TESTS_MPI_DIR" ] || { missing="NCCL_TESTS_MPI_DIR is not set"; return 1; }
  mpi_tests=$(NVCC_APPEND_FLAGS=$(mpi_flags) nccl_tests_in "$NCCL_TESTS_MPI_DIR" "$out/build-nccl-tests-mpi.log" MPI=1 \
    ${MPI_HOME:+"MPI_HOME=$MPI_HOME"} 2>"$out/missing.txt") || { missing=$(cat "$out/missing.txt"); return 1; }
}

# --- MPI -----------------------------------------------------------------------------------------------------------

# The flags of mpirun differ: Open MPI wants to be told that cores may be shared, MPICH knows no such flag.
need_launcher() {
  [ -z "${launcher:-}" ] || return 0
  command -v mpirun >/dev/null || { missing="there is no mpirun in PATH"; return 1; }
  # As root, in a container, without ssh; both generations of Open MPI's names.
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_plm_rsh_agent=/bin/sh PRTE_MCA_plm_ssh_agent=/bin/sh OMPI_MCA_btl_vader_single_copy_mechanism=none
  local flags
  : >"$out/mpirun.log"
  for flags in '--oversubscribe --bind-to none' '--map-by :OVERSUBSCRIBE --bind-to none' '--allow-run-as-root --oversubscribe' ''; do
    # shellcheck disable=SC2206 # flags are words
    launcher=(mpirun $flags)
    if [ "$(timeout --kill-after=5 30 "${launcher[@]}" -np 2 echo started 2>>"$out/mpirun.log" </dev/null | grep -c '^started$')" = 2 ]; then
      return
    fi
  done
  launcher=()
  missing="mpirun does not start two processes: $(grep -v '^[-[:space:]]*$' "$out/mpirun.log" | head -n 1 | cut -c 1-160)"
  return 1
}

# --- MPS -----------------------------------------------------------------------------------------------------------

mps_running=

# A folder without a daemon: what does not ask for MPS must not find one that the machine may run.
leave_mps() { export CUDA_MPS_PIPE_DIRECTORY=$out/without-mps; unset CUDA_MPS_LOG_DIRECTORY; }

mps_control() { timeout --kill-after=5 20 nvidia-cuda-mps-control <<<"$1" 2>>"$out/mps-control.log"; }

start_mps() {
  [ -z "$mps_running" ] || return 0
  command -v nvidia-cuda-mps-control >/dev/null || { missing="there is no nvidia-cuda-mps-control in PATH"; return 1; }
  mps_pipes=$out/mps/pipe
  # The path of a UNIX socket ends at 107 bytes.
  [ "${#mps_pipes}" -le 70 ] || mps_pipes=$(mktemp -d)
  mkdir -p "$mps_pipes" "$out/mps/log"
  export CUDA_MPS_PIPE_DIRECTORY=$mps_pipes CUDA_MPS_LOG_DIRECTORY=$out/mps/log
  mps_running=yes
  # A daemon keeps what it is given open, and this script's output must end with it.
  timeout --kill-after=5 30 nvidia-cuda-mps-control -d >"$out/mps-start.log" 2>&1 </dev/null || true
  local i
  for ((i = 0; i < 20; i++)); do
    if mps_control get_default_active_thread_percentage >/dev/null; then return; fi
    sleep 0.5
  done
  missing="the MPS daemon does not answer: $(tail -n 1 "$out/mps-start.log" | cut -c 1-120) $(tail -n 1 "$out/mps-control.log" | cut -c 1-120)"
  stop_mps
  return 1
}

stop_mps() {
  [ -n "$mps_running" ] || return 0
  mps_running=
  local pids pid
  # The daemon's own pid stands in its folder, those of its servers it tells.
  pids="$(mps_control get_server_list | grep -E '^[0-9]+$' || true) $(cat "$mps_pipes/nvidia-cuda-mps-control.pid" 2>/dev/null || true)"
  mps_control 'quit -t 5' >/dev/null || true
  for pid in $pids; do
    if grep -qs '^nvidia-cuda-mps' "/proc/$pid/comm"; then sleep 2; fi
    if grep -qs '^nvidia-cuda-mps' "/proc/$pid/comm"; then kill -KILL "$pid" 2>/dev/null || true; fi
  done
  rm -rf "$mps_pipes"
  leave_mps
}

# Whoever is killed in mid-kernel leaves the server in no defined state.
restart_mps_if_running() {
  [ -n "$mps_running" ] || return 0
  stop_mps
  start_mps || say "FAILED to start MPS again: $missing"
}

# Whether the clients so far went through our daemon: it starts a server for the first.
mps_was_used() { mps_control get_server_list | grep -qE '^[0-9]+$'; }
