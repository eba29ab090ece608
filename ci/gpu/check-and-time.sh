#!/usr/bin/env bash
# On a machine with a GPU: is every value right, does nothing hang, and how long does it take?
#
# Runs what was built before (target/release), `ossicle perf` and NVIDIA's all_reduce_perf with our library preloaded,
# with several ranks on one GPU. Goes on after a failure, prints one table, and fails at the end if anything did.
#
#     NCCL_TESTS_DIR   folder with all_reduce_perf, all_gather_perf and broadcast_perf, built with nccl-tests-patch/, or
#                      with nccl-tests' sources to build so (then CUDA_HOME and NCCL_HOME as its Makefile wants them)
#     REFERENCE_NCCL   optional: NVIDIA's libnccl.so.2, 2.30 or newer (older ones refuse ranks on one GPU), to race with
#     OUT              folder for the logs and the table; target/gpu-check if unset
#     BUDGET_S         seconds for everything (460); runs that no longer fit are reported as failures
#     REPEATS          how often -g 8 and -t 8 run with float sum (20)
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly root=$PWD
readonly library=$root/target/release/libnccl.so
readonly out=${OUT:-$root/target/gpu-check}
readonly budget_s=${BUDGET_S:-460}
readonly repeats=${REPEATS:-20}
# Longer than any run here should take; what takes longer has hung.
readonly run_limit_s=45

# One GPU for all ranks, and a hardware queue for every stream, so that no kernel queues behind one that waits for it.
export NCCL_MULTI_RANK_GPU_ENABLE=1 CUDA_DEVICE_MAX_CONNECTIONS=32
# The library says at the first communicator who it is.
export NCCL_DEBUG=VERSION

runs=0 failures=() summary=()

say() { echo "gpu: $*"; }

find_nccl_tests() {
  local folder=${NCCL_TESTS_DIR:?set it to a folder with all_reduce_perf or the sources of nccl-tests}
  local place
  for place in "$folder" "$folder/build"; do
    if [ -x "$place/all_reduce_perf" ] && [ -x "$place/all_gather_perf" ] && [ -x "$place/broadcast_perf" ]; then
      nccl_tests=$(cd "$place" && pwd)/all_reduce_perf
      return
    fi
  done
  [ -e "$folder/src/all_reduce.cu" ] || { say "$folder has neither all_reduce_perf nor src/all_reduce.cu" >&2; exit 2; }
  folder=$(cd "$folder" && pwd)
  say "building $folder/build/all_reduce_perf"
  NVCC_APPEND_FLAGS="-include $root/nccl-tests-patch/many-ranks-one-gpu.h" \
    make -C "$folder/src" -j"$(nproc)" BUILDDIR="$folder/build" "$folder"/build/{all_reduce,all_gather,broadcast}_perf >"$out/build.log" 2>&1 \
    || { tail -n 20 "$out/build.log" >&2; exit 2; }
  nccl_tests=$folder/build/all_reduce_perf
}

# The rows of a table: field 6 is the out-of-place time, 8 its bus bandwidth, 9 and 13 the counts of wrong elements.
rows() { awk '$1 ~ /^[0-9]+$/ && NF >= 13' "$1"; }

# What is wrong with a finished run, or nothing. Arguments: log, exit status, rows expected, who must have answered.
complaint() {
  local log=$1 status=$2 expected_rows=$3 who=$4 found_rows wrong
  case "$status" in
    0) ;;
    124 | 137) echo "hung: ended after $run_limit_s s"; return ;;
    *) echo "exit status $status: $(grep -ihE 'error|failed|wrong|invalid|ossicle:' "$log" | tail -n 1 | cut -c 1-160)"; return ;;
  esac
  found_rows=$(rows "$log" | wc -l)
  [ "$found_rows" = "$expected_rows" ] || { echo "$found_rows rows, expected $expected_rows"; return; }
  wrong=$(rows "$log" | awk '$9 != "0" || $13 != "0"' | wc -l)
  [ "$wrong" = 0 ] || { echo "$wrong rows with wrong or unchecked values"; return; }
  grep -q 'Out of bounds values *: 0 OK' "$log" || { echo "no line says that there were no wrong values"; return; }
  case "$who" in
    ossicle) grep -qi 'ossicle' "$log" || echo "another library answered: no line names Ossicle" ;;
    reference) ! grep -qi 'ossicle' "$log" || echo "Ossicle answered instead of the reference" ;;
  esac
}

# One run under a time limit. Arguments: name, rows expected, who must answer, command.
run() {
  local name=$1 expected_rows=$2 who=$3
  shift 3
  local log=$out/$name.log begun=$SECONDS status=0 problem
  runs=$((runs + 1))
  # Not to the log: a path in a command must not pass for a library that says its name.
  echo "$name: $*" >>"$out/commands.txt"
  : >"$log"
  if [ "$SECONDS" -ge "$budget_s" ]; then
    problem="not run: the budget of $budget_s s is spent"
  else
    timeout --kill-after=5 "$run_limit_s" "$@" >>"$log" 2>&1 </dev/null || status=$?
    problem=$(complaint "$log" "$status" "$expected_rows" "$who")
  fi
  if [ -n "$problem" ]; then
    failures+=("$name: $problem")
    say "FAILED $name: $problem"
  fi
  local smallest largest bandwidth
  smallest=$(rows "$log" | awk 'NR == 1 { print $6 }')
  largest=$(rows "$log" | awk 'END { print $6 }')
  bandwidth=$(rows "$log" | awk 'END { print $8 }')
  summary+=("$(printf '%-30s %5d s  %10s  %12s  %12s  %s' "$name" $((SECONDS - begun)) "${smallest:--}" "${largest:--}" \
    "${bandwidth:--}" "${problem:-ok}")")
}

# 8 B to 128 MiB in factors of 4: 13 rows.
readonly sweep=(-b 8 -e 128M -f 4)
readonly sweep_rows=13

ossicle() {
  local name=$1 expected_rows=$2
  shift 2
  run "$name" "$expected_rows" ossicle target/release/ossicle perf all_reduce -T 30 "$@"
}

# NVIDIA's program over our library.
ours() {
  local name=$1
  shift
  run "$name" "$sweep_rows" ossicle env LD_PRELOAD="$library" "$nccl_tests" "${sweep[@]}" -c 1 "$@"
}

theirs() {
  local name=$1
  shift
  # With its defaults, NVIDIA's library hangs with more than two ranks on a GPU: their blocks do not fit at once.
  run "$name" "$sweep_rows" reference env LD_PRELOAD="$REFERENCE_NCCL" NCCL_MAX_NCHANNELS=2 NCCL_NVLS_ENABLE=0 \
    CUDA_MODULE_LOADING=EAGER "$nccl_tests" "${sweep[@]}" -c 1 "$@"
}

# What the library does besides adding right; see behaviour.cu.
behaviour() {
  local program=$out/behaviour name log status problem
  ln -sfn "$library" "$out/libnccl.so.2"
  if ! nvcc -std=c++17 -arch=native -I include ci/gpu/behaviour.cu -o "$program" -L "$out" -l:libnccl.so.2 -Xlinker -rpath="$out" \
    >"$out/behaviour-build.log" 2>&1; then
    failures+=("behaviour: does not compile: $(tail -n 1 "$out/behaviour-build.log")")
    return
  fi
  for name in shared exclusive; do
    runs=$((runs + 1)) log=$out/behaviour-$name.log status=0 problem=
    (
      [ "$name" = shared ] || unset NCCL_MULTI_RANK_GPU_ENABLE
      OSSICLE_WAIT_REPORT_MS=200 NCCL_DEBUG=WARN timeout --kill-after=5 200 "$program" "$name"
    ) >"$log" 2>&1 </dev/null || status=$?
    grep -q '^[1-9][0-9]* passed, 0 failed$' "$log" || problem="exit status $status: $(grep -h '^failed' "$log" | head -n 1 | cut -c 1-200)"
    if [ "$name" = shared ] && ! grep -q 'rank 0 waits for rank 1' "$log"; then problem+=" no line names the rank that is waited for"; fi
    summary+=("$(printf '%-30s %s  %s' "behaviour-$name" "$(tail -n 1 "$log")" "${problem:-ok}")")
    if [ -n "$problem" ]; then
      failures+=("behaviour-$name: $problem")
      say "FAILED behaviour-$name: $problem"
    fi
  done
}

own_program() {
  ossicle perf-2-ranks "$sweep_rows" "${sweep[@]}" -n 20 -w 5
  ossicle perf-8-ranks "$sweep_rows" "${sweep[@]}" -n 5 -w 1 --ranks 8
}

every_type_and_op() {
  local mode datatype op
  for mode in '-g 2' '-g 8' '-t 8'; do
    for datatype in float bfloat16 half int32 uint8 double; do
      for op in sum max avg; do
        # shellcheck disable=SC2086 # the mode is a flag and its number
        ours "tests${mode/ /}-$datatype-$op" $mode -d "$datatype" -o "$op" -n 5 -w 1
      done
    done
  done
}

# The collectives that move data; their programs lie beside all_reduce_perf.
every_move() {
  local program mode datatype
  for program in all_gather_perf broadcast_perf; do
    for mode in '-g 2' '-g 8' '-t 8'; do
      for datatype in float uint8; do
        # shellcheck disable=SC2086 # the mode is a flag and its number
        run "${program%_perf}${mode/ /}-$datatype" "$sweep_rows" ossicle env LD_PRELOAD="$library" \
          "$(dirname "$nccl_tests")/$program" "${sweep[@]}" -c 1 $mode -d "$datatype" -n 5 -w 1
      done
    done
  done
}

again_and_again() {
  local i
  for ((i = 1; i <= repeats; i++)); do
    ours "repeat-g8-$i" -g 8 -d float -o sum -n 5 -w 1
    ours "repeat-t8-$i" -t 8 -d float -o sum -n 5 -w 1
  done
}

# Alternating, so that a clock or a neighbour that drifts hits both.
race() {
  local mode round
  for mode in '-g 2' '-t 2' '-t 8'; do
    for round in 1 2; do
      # shellcheck disable=SC2086
      ours "race${mode/ /}-ossicle-$round" $mode -n 20 -w 5
      # shellcheck disable=SC2086
      theirs "race${mode/ /}-reference-$round" $mode -n 20 -w 5
    done
  done
}

# Size, and the shorter out-of-place time of the two rounds of each library.
race_table() {
  local mode
  for mode in -g2 -t2 -t8; do
    echo
    echo "race $mode, float sum: bytes, us Ossicle, us reference, ratio"
    join <(best_times "$out/race$mode-ossicle-"*.log) <(best_times "$out/race$mode-reference-"*.log) | sort -n \
      | awk '{ printf "%12d  %10.2f  %10.2f  %6.2f\n", $1, $2, $3, $2 / $3 }'
  done
}

best_times() {
  cat "$@" 2>/dev/null | awk '$1 ~ /^[0-9]+$/ && NF >= 13 { if (!($1 in best) || $6 < best[$1]) best[$1] = $6 }
    END { for (size in best) print size, best[size] }' | sort
}

report() {
  echo "machine: $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)"
  echo "who answered: $(grep -ih -m 1 'ossicle' "$out"/tests-g2-float-sum.log | tail -n 1)"
  printf '%-30s %7s  %10s  %12s  %12s  %s\n' run time "us first" "us last row" "busbw last" result
  printf '%s\n' "${summary[@]}"
  [ -z "${REFERENCE_NCCL:-}" ] || race_table
  echo
  [ "${#failures[@]}" = 0 ] || printf 'FAILED %s\n' "${failures[@]}"
  echo "$((runs - ${#failures[@]})) passed, ${#failures[@]} failed in $SECONDS s"
}

mkdir -p "$out"
: >"$out/commands.txt"
[ -e "$library" ] && [ -x target/release/ossicle ] || { say "target/release lacks libnccl.so or ossicle: build first" >&2; exit 2; }
nvidia-smi --list-gpus >/dev/null 2>&1 || { say "there is no GPU here" >&2; exit 2; }
find_nccl_tests
own_program
behaviour
every_type_and_op
every_move
again_and_again
[ -z "${REFERENCE_NCCL:-}" ] || race
report | tee "$out/summary.txt"
[ "${#failures[@]}" = 0 ]
