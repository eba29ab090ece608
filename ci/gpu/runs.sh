#!/usr/bin/env bash
# Runs programs under a time limit, judges what they printed, and gathers the lines of the summary and of the races.
# Sourced by check-and-time.sh, which sets out, budget_s and quick.

# What a run leaves when its time is up or a rank crashes is found by a variable in its environment, whoever adopted it.
readonly mark_name=GPU_CHECK_RUN
# Longer than any table should take; what takes longer has hung.
readonly table_limit_s=60

runs=0 failures=() not_run=() summary=() running_mark=

say() { echo "gpu: $*"; }

# One line of the summary, and a failure if there is a problem. Arguments: name, what was measured, problem or nothing.
record() {
  local name=$1 measured=$2 problem=$3
  # One line for all of them, at the end.
  if [ "${problem#not run}" != "$problem" ]; then not_run+=("$name"); return; fi
  summary+=("$(printf '%-34s %s  %s' "$name" "$measured" "${problem:-ok}")")
  [ -z "$problem" ] || { failures+=("$name: $problem"); say "FAILED $name: $problem"; }
}

# A check that needs no program: counts like a run. Arguments as record's.
record_check() {
  runs=$((runs + 1))
  record "$@"
}

marked() { grep -lsaz "^$mark_name=$1\$" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3 || true; }

# Ends what still runs of a run; prints how many there were.
end_marked() {
  local mark=$1 pids signal
  pids=$(marked "$mark")
  # A process that is just leaving is none that was left behind.
  [ -z "$pids" ] || { sleep 1; pids=$(marked "$mark"); }
  local found
  found=$(wc -w <<<"$pids")
  for signal in TERM KILL; do
    [ -n "$pids" ] || break
    # shellcheck disable=SC2086 # a list of numbers
    kill -s "$signal" $pids 2>/dev/null || true
    sleep 2
    pids=$(marked "$mark")
  done
  echo "$found"
}

# Runs a command with its output in $out/NAME.log. Arguments: name, limit in seconds, command. Sets log, status, took_s,
# and problem where the run did not come to its own end.
attempt() {
  local name=$1 limit_s=$2 begun=$SECONDS left_s=$((budget_s - SECONDS)) left_behind
  shift 2
  log=$out/$name.log status=0 took_s=0 problem=
  runs=$((runs + 1))
  # Not to the log: a path in a command must not pass for a library that says its name.
  echo "$name: $*" >>"$out/commands.txt"
  : >"$log"
  if [ "$left_s" -lt 5 ]; then
    problem="not run" status=124
    return
  fi
  local given_s=$((limit_s < left_s ? limit_s : left_s))
  running_mark=$$-$runs
  # In the background, so that a signal to this script is heard at once.
  env "$mark_name=$running_mark" timeout --kill-after=5 "$given_s" "$@" >>"$log" 2>&1 </dev/null &
  wait $! || status=$?
  left_behind=$(end_marked "$running_mark")
  running_mark=
  took_s=$((SECONDS - begun))
  if [ "$status" = 124 ] || [ "$status" = 137 ]; then
    problem="hung: ended after $given_s s"
    [ "$given_s" = "$limit_s" ] || problem="ended after $given_s s, when the budget of $budget_s s was spent"
    last_line_to_problem
    restart_mps_if_running
  elif [ "$left_behind" != 0 ]; then
    problem="exit status $status, and $left_behind processes were left behind"
  fi
}

last_line_to_problem() {
  local last
  last=$(grep -av '^[[:space:]]*$' "$log" | tail -n 1 | tr -s ' ' | cut -c 1-160 || true)
  [ -z "$last" ] || problem+="; last line: $last"
}

# The sentence of a log that tells best why a program failed: the library's own first, MPI's epilogue last.
sentence() {
  local pattern line
  for pattern in 'NCCL WARN|Test NCCL failure|Last error|Test CUDA failure|ossicle:' 'error|failed|wrong|invalid|cannot'; do
    line=$(grep -iaE "$pattern" "$1" | head -n 1 | cut -c 1-200 || true)
    [ -z "$line" ] || { echo "$line"; return; }
  done
  grep -av '^[[:space:]]*$' "$1" | tail -n 1 | cut -c 1-200 || true
}

# The rows of a table: field 6 is the out-of-place time, 8 its bus bandwidth, 9 and 13 the counts of wrong elements.
rows() { awk '$1 ~ /^[0-9]+$/ && NF >= 13' "$@"; }

# The library says at the first communicator who it is; the word alone may be part of a path.
ossicle_answered() { grep -qaE 'Ossicle [0-9]' "$1"; }

# What is wrong with a finished run of a program that prints a table, or nothing. Arguments: log, exit status, rows
# expected, who must have answered (ossicle or reference).
table_complaint() {
  local log=$1 status=$2 expected_rows=$3 who=$4 found_rows wrong
  [ "$status" = 0 ] || { echo "exit status $status: $(sentence "$log")"; return; }
  found_rows=$(rows "$log" | wc -l)
  [ "$found_rows" = "$expected_rows" ] || { echo "$found_rows rows, expected $expected_rows"; return; }
  wrong=$(rows "$log" | awk '$9 != "0" || $13 != "0"' | wc -l)
  [ "$wrong" = 0 ] || { echo "$wrong rows with wrong or unchecked values"; return; }
  grep -q 'Out of bounds values *: 0 OK' "$log" || { echo "no line says that there were no wrong values"; return; }
  case "$who" in
    ossicle) ossicle_answered "$log" || echo "another library answered: no line names Ossicle" ;;
    reference) ! ossicle_answered "$log" || echo "Ossicle answered instead of the reference" ;;
    *) echo "who is $who?" ;;
  esac
}

# One run of a program that prints a table. Arguments: name, rows expected, who must answer, command.
run_table() {
  local name=$1 expected_rows=$2 who=$3
  shift 3
  attempt "$name" "$table_limit_s" "$@"
  [ -n "$problem" ] || problem=$(table_complaint "$log" "$status" "$expected_rows" "$who")
  record_table "$name"
}

record_table() {
  local smallest largest bandwidth
  read -r smallest largest bandwidth < <(rows "$log" | awk 'NR == 1 { first = $6 } { last = $6; busbw = $8 }
    END { print (NR ? first : "-"), (NR ? last : "-"), (NR ? busbw : "-") }')
  record "$1" "$(printf '%4d s  %10s  %12s  %10s' "$took_s" "$smallest" "$largest" "$bandwidth")" "$problem"
}

# One run of a program of checks, whose last line says 'N passed, 0 failed'. Arguments: name, limit in seconds, command.
run_checks() {
  local name=$1
  shift
  attempt "$name" "$@"
  if [ -z "$problem" ] && { [ "$status" != 0 ] || ! grep -qa '^[1-9][0-9]* passed, 0 failed$' "$log"; }; then
    problem="exit status $status: $(grep -ha '^failed' "$log" | head -n 1 | cut -c 1-250 || true)"
    [ "${problem%: }" = "$problem" ] || problem+=$(sentence "$log")
  fi
  record "$name" "$(printf '%4d s  %s' "$took_s" "$(grep -ahoE '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -n 1 || true)")" "$problem"
}

# Sizes from 8 bytes to $1 in factors of $2: how many.
count_of_sizes() { awk -v last="$1" -v factor="$2" 'BEGIN { for (size = 8; size <= last; size *= factor) n++; print n }'; }

# --- races ---------------------------------------------------------------------------------------------------------

# Bytes and the shortest out-of-place time over logs, sorted for join.
best_times() {
  local logs=() file
  for file in "$@"; do [ ! -e "$file" ] || logs+=("$file"); done
  [ "${#logs[@]}" != 0 ] || return 0
  rows "${logs[@]}" | awk '$1 > 0 { if (!($1 in best) || $6 + 0 < best[$1]) best[$1] = $6 + 0 } END { for (size in best) print size, best[size] }' | sort
}

# Bytes, us Ossicle, us reference, ratio: the best of the rounds of a race. Argument: its name.
race_rows() {
  join <(best_times "$out/race-$1-ossicle-"*.log) <(best_times "$out/race-$1-reference-"*.log) | sort -n \
    | awk '$3 > 0 { printf "%12d  %10.2f  %10.2f  %7.3f\n", $1, $2, $3, $2 / $3 }'
}

race_table() {
  printf '\nrace %s, float sum: bytes, us Ossicle, us reference, ratio\n' "$1" >>"$out/races.txt"
  race_rows "$1" >>"$out/races.txt"
}

# A line that says whether a ratio is within its floor. Arguments: race, bytes (or "every"), largest ratio.
race_floor() {
  local name=$1 bytes=$2 most=$3 verdict
  verdict=$(race_rows "$name" | awk -v bytes="$bytes" -v most="$most" '
    bytes == "every" || $1 == bytes { n++; if ($4 > worst) { worst = $4; at = $1 } }
    END {
      if (!n) print "no figure at " bytes " bytes of both libraries"
      else if (worst > most) printf "ratio %.3f at %d bytes, at most %.2f is wanted\n", worst, at, most
    }')
  printf '%s race %s at %s bytes: ratio at most %s%s\n' "$([ -z "$verdict" ] && echo PASS || echo FAIL)" "$name" "$bytes" "$most" \
    "${verdict:+: $verdict}" >>"$out/floors.txt"
  record_check "floor-$name-$bytes" "at most $most" "$verdict"
}

# --- the end -------------------------------------------------------------------------------------------------------

report() {
  echo "machine: $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1), $gpus GPU(s)"
  echo "who answered: $(grep -ahoE -m 1 'Ossicle [0-9][^ ]*' "$out"/*.log 2>/dev/null | sort | uniq -c | tr '\n' ';')"
  echo "stages: $*"
  printf '%-34s %6s  %10s  %12s  %10s  %s\n' run time "us first" "us last row" "busbw last" result
  [ "${#summary[@]}" = 0 ] || printf '%s\n' "${summary[@]}"
  local file
  for file in "$out/times.txt" "$out/races.txt" "$out/floors.txt"; do
    [ ! -s "$file" ] || { echo; cat "$file"; }
  done
  echo
  [ "${#not_run[@]}" = 0 ] || failures+=("${#not_run[@]} runs no longer fit the budget of $budget_s s: ${not_run[*]}")
  [ "${#failures[@]}" = 0 ] || printf 'FAILED %s\n' "${failures[@]}"
  local failed=$((${#failures[@]} + (${#not_run[@]} ? ${#not_run[@]} - 1 : 0)))
  echo "$((runs - failed)) passed, $failed failed in $SECONDS s"
}
