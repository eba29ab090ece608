#!/usr/bin/env bash
# On a machine with a GPU: is every value right, does nothing hang, and how long does it take?
#
#     ci/gpu/check-and-time.sh [--quick] [STAGE...]      no stage: all of them
#
# Runs what was built before (target/release). Goes on after a failure, prints one summary, and ends with status 1 if
# anything failed, with 2 if nothing could be run. --quick takes fewer sizes, shapes and repeats, so that all stages fit
# in some six minutes; without it, give a stage or two at a time to a call that has a limit.
#
#     stage      seconds, full / --quick (estimates for one H200); what
#     own         15 /   5  ossicle perf, ranks as threads
#     behaviour   30 /  30  what the library does besides adding right (behaviour.cu)
#     types      200 /  40  nccl-tests all-reduce, every type and operation, ranks as threads
#     moves       50 /  15  nccl-tests all-gather and broadcast, ranks as threads
#     repeat     150 /  10  the same shapes again and again
#     mps        150 /  60  unmodified nccl-tests, a process a rank under MPS, eager and in graphs; two GPUs where there are
#     pytorch    100 /  60  PyTorch: import, collectives, graphs, DDP; under MPS and without
#     killed     120 /  35  ranks that are killed at random points, and bad input, in processes without MPS (killed.cu)
#     memcheck    80 /  25  compute-sanitizer over a short sweep, a process a rank
#     race       420 /  80  against REFERENCE_NCCL, a process a rank under MPS; two GPUs where there are
#
#     NCCL_TESTS_DIR      folder with all_reduce_perf, all_gather_perf and broadcast_perf, built with nccl-tests-patch/, or
#                         with nccl-tests' sources to build so (then CUDA_HOME and NCCL_HOME as its Makefile wants them):
#                         types, moves, repeat
#     NCCL_TESTS_MPI_DIR  the same, unmodified and with MPI=1 (to build them: mpicc in PATH, or MPI_HOME): mps, memcheck, race
#     REFERENCE_NCCL      NVIDIA's libnccl.so.2, 2.30 or newer (older ones refuse ranks on one GPU): race
#     PYTHON              a python that imports torch: pytorch (python3)
#     OUT                 folder for the logs and the summary; target/gpu-check if unset
#     BUDGET_S            seconds for everything (560); runs that no longer fit are reported as failures
#     REPEATS             how often `repeat` runs each shape, and `killed` kills (20; 2 and 5 with --quick)
#     SEED                of the points at which ranks are killed; printed, random if unset
#
# Stages with MPS start a daemon of their own and stop it; the others run without MPS, also where the machine has a daemon.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly root=$PWD
readonly library=$root/target/release/libnccl.so
readonly all_stages=(own behaviour types moves repeat mps pytorch killed memcheck race)
mkdir -p "${OUT:=$root/target/gpu-check}"
out=$(cd "$OUT" && pwd)
readonly out budget_s=${BUDGET_S:-560}

quick='' stages=()
for word in "$@"; do
  case " ${all_stages[*]} " in
    *" $word "*) stages+=("$word") ;;
    *) [ "$word" = --quick ] || { echo "gpu: unknown stage $word; there are --quick and ${all_stages[*]}" >&2; exit 2; }; quick=yes ;;
  esac
done
[ "${#stages[@]}" != 0 ] || stages=("${all_stages[@]}")

# shellcheck source=ci/gpu/runs.sh
. ci/gpu/runs.sh
# shellcheck source=ci/gpu/machine.sh
. ci/gpu/machine.sh

# One of two values: for a full run and for a quick one.
full_or_quick() { if [ -z "$quick" ]; then echo "$1"; else echo "$2"; fi; }

readonly repeats=${REPEATS:-$(full_or_quick 20 2)}
readonly kills=${REPEATS:-$(full_or_quick 20 5)}
# 8 B to 128 MiB. The race needs 4 KiB among its sizes, which factors of 4 pass by.
factor=$(full_or_quick 4 8)
race_factor=$(full_or_quick 2 8)
readonly factor race_factor
readonly sweep=(-b 8 -e 128M -f "$factor") race_sweep=(-b 8 -e 128M -f "$race_factor")
sweep_rows=$(count_of_sizes $((128 << 20)) "$factor")
race_rows_wanted=$(count_of_sizes $((128 << 20)) "$race_factor")
readonly sweep_rows race_rows_wanted

# Ranks as threads of one process share a GPU; each stream needs a hardware queue, so that no kernel queues behind one
# that waits for it.
readonly threads_env=(NCCL_MULTI_RANK_GPU_ENABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER)
# Ranks as processes on one GPU; all else at defaults.
readonly share_env=(NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_TESTS_DEVICE=0)
# The library says at the first communicator who it is.
export NCCL_DEBUG=VERSION
unset NCCL_MULTI_RANK_GPU_ENABLE CUDA_DEVICE_MAX_CONNECTIONS LD_PRELOAD

# --- ranks as threads ----------------------------------------------------------------------------------------------

stage_own() {
  local perf=(env "${threads_env[@]}" target/release/ossicle perf all_reduce -T 30 "${sweep[@]}")
  run_table perf-2-ranks "$sweep_rows" ossicle "${perf[@]}" -n 20 -w 5
  run_table perf-8-ranks "$sweep_rows" ossicle "${perf[@]}" -n 5 -w 1 --ranks 8
}

# Compiles a program of ci/gpu against the library as libnccl.so.2.
compile() {
  ln -sfn "$library" "$out/libnccl.so.2"
  nvcc -std=c++17 -arch=native -I include "ci/gpu/$1.cu" -o "$out/$1" -L "$out" -l:libnccl.so.2 -Xlinker -rpath="$out" \
    >"$out/build-$1.log" 2>&1 && return
  record_check "build-$1" "" "does not compile: $(grep -i error "$out/build-$1.log" | head -n 1 | cut -c 1-200)"
  return 1
}

stage_behaviour() {
  compile behaviour || return 0
  run_checks behaviour-shared 200 env "${threads_env[@]}" OSSICLE_WAIT_REPORT_MS=200 NCCL_DEBUG=WARN "$out/behaviour" shared
  [ ! -s "$log" ] || record_check behaviour-late-wait "" "$(grep -q 'rank 0 waits for rank 1' "$log" || echo 'no line names the rank that is waited for')"
  run_checks behaviour-exclusive 100 env CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_DEBUG=WARN "$out/behaviour" exclusive
}

# One of nccl-tests' programs over our library, ranks as threads. Arguments: name, program, flags.
threads() {
  local name=$1 program=$2
  shift 2
  run_table "$name" "$sweep_rows" ossicle env "${threads_env[@]}" LD_PRELOAD="$library" "$nccl_tests/$program" "${sweep[@]}" \
    -c 1 -n 5 -w 1 "$@"
}

stage_types() {
  need_nccl_tests || { record_check types "" "$missing"; return; }
  local mode datatype op
  for mode in '-g 2' '-g 8' '-t 8'; do
    [ -z "$quick" ] || [ "$mode" != '-g 2' ] || continue
    for datatype in float bfloat16 half int32 uint8 double; do
      for op in sum max avg; do
        [ -z "$quick" ] || [ "$op" = sum ] || [ "$datatype" = float ] || continue
        # shellcheck disable=SC2086 # the mode is a flag and its number
        threads "types${mode/ /}-$datatype-$op" all_reduce_perf $mode -d "$datatype" -o "$op"
      done
    done
  done
}

stage_moves() {
  need_nccl_tests || { record_check moves "" "$missing"; return; }
  local program mode datatype
  for program in all_gather_perf broadcast_perf; do
    for mode in '-g 2' '-g 8' '-t 8'; do
      for datatype in float uint8; do
        [ -z "$quick" ] || [ "$datatype" = float ] || continue
        # shellcheck disable=SC2086
        threads "${program%_perf}${mode/ /}-$datatype" "$program" $mode -d "$datatype"
      done
    done
  done
}

stage_repeat() {
  need_nccl_tests || { record_check repeat "" "$missing"; return; }
  local i
  for ((i = 1; i <= repeats; i++)); do
    threads "repeat-g8-$i" all_reduce_perf -g 8 -d float -o sum
    threads "repeat-t8-$i" all_reduce_perf -t 8 -d float -o sum
  done
}

# --- ranks as processes --------------------------------------------------------------------------------------------

# Unmodified nccl-tests. Arguments: name, library, who must answer, rows, ranks, program, flags; ranks_env holds settings.
processes() {
  local name=$1 preload=$2 who=$3 expected_rows=$4 ranks=$5 program=$6
  shift 6
  run_table "$name" "$expected_rows" "$who" "${launcher[@]}" -np "$ranks" env "${ranks_env[@]}" LD_PRELOAD="$preload" \
    "$mpi_tests/$program" "$@"
}

stage_mps() {
  if ! need_mpi_tests || ! start_mps; then record_check mps "" "$missing"; return; fi
  local program ranks mode ranks_env=("${share_env[@]}")
  for program in "${programs[@]}"; do
    for ranks in $(full_or_quick '1 2 4 8' '1 2 8'); do
      for mode in '' '-G 5'; do
        # shellcheck disable=SC2086
        processes "mps-${program%_perf}-$ranks${mode/ /}" "$library" ossicle "$sweep_rows" "$ranks" "$program" "${sweep[@]}" $mode
      done
    done
  done
  record_check mps-was-used "" "$(mps_was_used || echo 'no client went through the MPS daemon')"
  for ranks in 2 8; do
    run_table "mps-perf-$ranks" "$sweep_rows" ossicle env NCCL_MULTI_RANK_GPU_ENABLE=1 target/release/ossicle perf all_reduce -T 30 \
      "${sweep[@]}" -n 20 -w 5 --ranks "$ranks" --processes "$ranks"
  done
  stop_mps
  [ "$gpus" -ge 2 ] || return 0
  ranks_env=()
  for program in "${programs[@]}"; do
    for mode in '' '-G 5'; do
      # shellcheck disable=SC2086
      {
        processes "gpus2-${program%_perf}${mode/ /}" "$library" ossicle "$sweep_rows" 2 "$program" "${sweep[@]}" $mode
        processes "gpus2-g2-${program%_perf}${mode/ /}" "$library" ossicle "$sweep_rows" 1 "$program" "${sweep[@]}" -g 2 $mode
      }
    done
  done
}

# pytorch_smoke.py prints a line 'ok NAME', 'refused NAME: why', or 'failed NAME: why' for each step, and 'time NAME us'.
smoke() {
  local name=$1
  shift
  run_checks "$name" 200 env LD_PRELOAD="$library" NCCL_MULTI_RANK_GPU_ENABLE=1 "$python" ci/gpu/pytorch_smoke.py "$@"
  grep -aE '^(time|refused) ' "$log" | sed "s/^/$name: /" >>"$out/times.txt" || true
}

stage_pytorch() {
  local python=${PYTHON:-python3}
  attempt pytorch-import 100 env LD_PRELOAD="$library" "$python" -c 'import torch; print("nccl", torch.cuda.nccl.version(), "torch", torch.__version__)'
  [ -n "$problem" ] || [ "$status" = 0 ] || problem="exit status $status: $(tail -n 1 "$log" | cut -c 1-200)"
  record pytorch-import "$(printf '%4d s  %s' "$took_s" "$(grep -a '^nccl' "$log" | cut -c 1-60 || true)")" "$problem"
  [ -z "$problem" ] || return 0
  smoke pytorch-no-mps --ranks 2
  smoke pytorch-split --ranks 2 --split
  start_mps || { record_check pytorch-mps "" "$missing"; return; }
  smoke pytorch-mps --ranks 2
  record_check pytorch-mps-was-used "" "$(mps_was_used || echo 'no client went through the MPS daemon')"
  [ -n "$quick" ] || smoke pytorch-mps-4 --ranks 4
  stop_mps
}

stage_killed() {
  compile killed || return 0
  local seed=${SEED:-$RANDOM}
  say "killed: seed $seed"
  run_checks killed-bad-input 120 env NCCL_DEBUG=WARN "$out/killed" bad
  run_checks "killed-seed-$seed" 400 env NCCL_DEBUG=WARN NCCL_MULTI_RANK_GPU_ENABLE=1 "$out/killed" random "$seed" "$kills"
  run_table killed-good-run-after "$(count_of_sizes $((1 << 20)) 8)" ossicle env NCCL_MULTI_RANK_GPU_ENABLE=1 target/release/ossicle perf \
    all_reduce -T 30 -b 8 -e 1M -f 8 -n 2 -w 1 --ranks 2 --processes 2
}

# Each rank under its own sanitizer, taking turns on the GPU: small sizes, few calls, a generous limit. Racecheck and
# synccheck speak of shared memory within a block only.
stage_memcheck() {
  need_mpi_tests || { record_check memcheck "" "$missing"; return; }
  command -v compute-sanitizer >/dev/null || { record_check memcheck "" "there is no compute-sanitizer in PATH"; return; }
  # The sanitizer preloads libraries of its own; should it forget ours, the loader finds ours under the name that is asked for.
  mkdir -p "$out/lib"
  ln -sfn "$library" "$out/lib/libnccl.so.2"
  local program ranks wanted name
  wanted=$(count_of_sizes $((2 << 20)) 64)
  for program in "${programs[@]}"; do
    for ranks in $(full_or_quick '1 2 4' 2); do
      name=memcheck-${program%_perf}-$ranks
      rm -f "$out/$name".sanitizer-*
      # The library asks the driver about pointers that may be none, and takes the error for the answer: no API errors.
      attempt "$name" 150 "${launcher[@]}" -np "$ranks" env "${share_env[@]}" LD_PRELOAD="$library" LD_LIBRARY_PATH="$out/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
        OSSICLE_INIT_TIMEOUT_MS=100000 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
        --log-file "$out/$name.sanitizer-%p" "$mpi_tests/$program" -b 8 -e 2M -f 64 -n 1 -w 0 -c 1
      [ -n "$problem" ] || problem=$(sanitizer_complaint "$out/$name" "$ranks")
      [ -n "$problem" ] || problem=$(table_complaint "$log" "$status" "$wanted" ossicle)
      record_table "$name"
    done
  done
}

# What is wrong with the logs that the ranks' sanitizers wrote, or nothing. Arguments: start of their names, ranks.
sanitizer_complaint() {
  local logs=() clean first
  mapfile -t logs < <(compgen -G "$1.sanitizer-*" || true)
  [ "${#logs[@]}" = "$2" ] || { echo "${#logs[@]} logs of sanitizers, expected $2"; return; }
  clean=$(grep -lE 'ERROR SUMMARY: 0 errors' "${logs[@]}" | wc -l)
  [ "$clean" != "$2" ] || return 0
  first=$(grep -hE '========= [A-Z]' "${logs[@]}" | grep -vE 'COMPUTE-SANITIZER|ERROR SUMMARY: 0 errors' | head -n 1 | cut -c 1-160 || true)
  echo "$((${#logs[@]} - clean)) ranks are not clean: ${first:-no ERROR SUMMARY line}"
}

# --- the race ------------------------------------------------------------------------------------------------------

# Alternating, so that a clock or a neighbour that drifts hits both. Arguments: name, rounds, processes, program, flags;
# reference_env holds what the reference needs besides ranks_env.
race() {
  local name=$1 rounds=$2 ranks=$3 program=$4 round shared=("${ranks_env[@]}") ranks_env
  shift 4
  rm -f "$out/race-$name"-{ossicle,reference}-*.log
  for ((round = 1; round <= rounds; round++)); do
    ranks_env=("${shared[@]}")
    processes "race-$name-ossicle-$round" "$library" ossicle "$race_rows_wanted" "$ranks" "$program" "${race_sweep[@]}" \
      -n "$race_iterations" -w 5 "$@"
    ranks_env=("${shared[@]}" "${reference_env[@]}")
    processes "race-$name-reference-$round" "$REFERENCE_NCCL" reference "$race_rows_wanted" "$ranks" "$program" "${race_sweep[@]}" \
      -n "$race_iterations" -w 5 "$@"
  done
  race_table "$name"
}

stage_race() {
  [ -e "${REFERENCE_NCCL:-}" ] || { record_check race "" "REFERENCE_NCCL is no file: '${REFERENCE_NCCL:-}'"; return; }
  if ! need_mpi_tests || ! start_mps; then record_check race "" "$missing"; return; fi
  local program ranks mode collective rounds race_iterations ranks_env=("${share_env[@]}") reference_env
  race_iterations=$(full_or_quick 50 20)
  for program in "${programs[@]}"; do
    collective=${program%_perf}
    rounds=1
    [ "$collective" != all_reduce ] || rounds=$(full_or_quick 3 2)
    for ranks in 2 4 8; do
      # A quick race has the floors, and 8 ranks of the all-reduce.
      [ -z "$quick" ] || [ "$ranks" = 2 ] || [ "$collective-$ranks" = all_reduce-8 ] || continue
      reference_env=(NCCL_NVLS_ENABLE=0)
      # With its defaults, NVIDIA's library hangs with more than two ranks on a GPU: their blocks do not fit at once.
      [ "$ranks" = 2 ] || reference_env+=(NCCL_MAX_NCHANNELS=4)
      for mode in '' '-G 5'; do
        # shellcheck disable=SC2086
        race "$collective-$ranks${mode/ /}" "$rounds" "$ranks" "$program" $mode
      done
    done
    if [ "$collective" = all_reduce ]; then
      race_floor all_reduce-2 4096 0.8
      race_floor all_reduce-2-G5 4096 0.6
      race_floor all_reduce-2 134217728 0.8
    fi
  done
  stop_mps
  [ "$gpus" -ge 2 ] || return 0
  ranks_env=() reference_env=(NCCL_NVLS_ENABLE=0)
  for program in "${programs[@]}"; do
    collective=${program%_perf}
    for mode in '' '-G 5'; do
      # shellcheck disable=SC2086
      {
        race "gpus2-$collective${mode/ /}" 2 2 "$program" $mode
        race "gpus2-g2-$collective${mode/ /}" 2 1 "$program" -g 2 $mode
      }
      race_floor "gpus2-$collective${mode/ /}" every 1.0
      race_floor "gpus2-g2-$collective${mode/ /}" every 1.0
    done
  done
}

# --- all of it -----------------------------------------------------------------------------------------------------

at_the_end() {
  local status=$?
  trap - EXIT
  [ -z "$running_mark" ] || end_marked "$running_mark" >/dev/null
  stop_mps
  exit "$status"
}

[ -e "$library" ] && [ -x target/release/ossicle ] || { say "target/release lacks libnccl.so or ossicle: build first" >&2; exit 2; }
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
[ "$gpus" -ge 1 ] || { say "there is no GPU here" >&2; exit 2; }
: >"$out/commands.txt"
rm -f "$out/times.txt" "$out/races.txt" "$out/floors.txt"
trap at_the_end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
leave_mps
for stage in "${stages[@]}"; do
  say "$stage"
  begun=$SECONDS
  "stage_$stage"
  # A stage that came to a bad end in its middle.
  stop_mps
  summary+=("$(printf '%-34s %4d s' "= $stage" $((SECONDS - begun)))")
done
report "${stages[@]}" ${quick:+--quick} | tee "$out/summary.txt"
[ "$((${#failures[@]} + ${#not_run[@]}))" = 0 ]
